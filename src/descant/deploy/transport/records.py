"""Payloads as Flower's records.

Flower transfers each record and each array by a request of its own, some ten milliseconds each. So small
blobs are stored with the facts. Large ones are arrays, which Flower stores once if several clients get the
same.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from descant.deploy.transport import Payload, Rejected, Seal

RECORD, BLOBS, SEAL = "descant", "pieces", "seal."
STYPE = "descant.raw"  # tensors end to end, little-endian, row after row
SMALL = 2**19  # bytes that are stored with the facts


def to_records(payload: Payload) -> RecordDict:
    config = {"facts": payload.facts, "tensors": payload.tensors}
    if payload.seal is not None:
        config |= {SEAL + name: value for name, value in payload.seal._asdict().items()}
    if sum(map(len, payload.blobs.values())) <= SMALL:
        return RecordDict({RECORD: ConfigRecord({**config, **payload.blobs})})
    arrays = {name: Array("uint8", (len(data),), STYPE, data) for name, data in payload.blobs.items()}
    return RecordDict({RECORD: ConfigRecord(config), BLOBS: ArrayRecord(arrays)})


def from_records(content: RecordDict) -> Payload:
    config, arrays = content.get(RECORD), content.get(BLOBS, ArrayRecord())
    if not {*content} <= {RECORD, BLOBS} or not isinstance(config, ConfigRecord) \
            or not isinstance(arrays, ArrayRecord):
        raise Rejected("not a message of descant")
    blobs = {name: array.data for name, array in arrays.items() if array.stype == STYPE}
    blobs |= {name: value for name, value in config.items() if isinstance(value, bytes)}
    signed = [blobs.pop(SEAL + name, None) for name in Seal._fields]
    seal = None if None in signed else Seal(*(part or b"" for part in signed))
    return Payload(config.get("facts"), config.get("tensors"), blobs, seal)
