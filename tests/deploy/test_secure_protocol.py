"""Secure aggregation as a protocol on vectors: sums, drop-outs at each phase, lies, what the server sees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from scipy import stats
from secure_helpers import ATTEMPT, BOUND, PHASES, Authority, Trial

from descant.deploy.secure import primitives
from descant.deploy.secure.encoding import FixedPoint, OutOfRange
from descant.deploy.secure.participant import Accusation, Participant
from descant.deploy.secure.parts import Revealed, TooFew, needed
from descant.deploy.secure.summation import Liar
from descant.deploy.transport import Rejected

AUTHORITY = Authority()


@pytest.mark.parametrize("authority", [None, AUTHORITY], ids=["unsigned", "signed"])
@pytest.mark.parametrize(("count", "threshold"), [(3, 3), (4, 3), (5, 4), (7, 4)])
def test_the_sum_is_the_plain_sum(count: int, threshold: int, authority: Authority | None) -> None:
    trial = Trial(count, threshold, authority=authority)
    total = trial.run()
    assert np.abs(total - trial.plain()).max() <= count * trial.encoding.error + 1e-12


@pytest.mark.slow
def test_who_drops_out_where_by_brute_force() -> None:
    """Two of five clients, each before any of the phases: the sum is that of the vectors that came."""
    for pair in ((0, 4), (1, 3)):
        for way in itertools.product(PHASES, repeat=2):
            gone = {phase: [k for k, when in zip(pair, way, strict=True) if when == phase]
                    for phase in PHASES}
            trial = Trial(5, 3, length=3)
            total = trial.run(gone)
            assert np.abs(total - trial.plain()).max() <= 1e-12
            assert sorted(trial.sent) == trial.there(gone, "mask")


@pytest.mark.parametrize("phase", PHASES)
def test_a_threshold_that_cannot_be_met(phase: str) -> None:
    trial = Trial(5, 4, authority=AUTHORITY)
    with pytest.raises(TooFew, match="needs 4"):
        trial.run({phase: [0, 3]})


def test_signed_sums_survive_drop_outs() -> None:
    trial = Trial(6, 4, authority=AUTHORITY)
    total = trial.run({"mask": [2], "unmask": [5]})
    assert np.abs(total - trial.plain()).max() <= 1e-12
    assert sorted(trial.sent) == [0, 1, 3, 4, 5]


def test_a_majority_and_three_are_always_needed() -> None:
    assert [needed(1, n) for n in (2, 3, 4, 5, 6, 10)] == [3, 3, 3, 3, 4, 6]
    assert needed(9, 10) == 9


# -- the encoding ------------------------------------------------------------------------------------


def test_the_stated_error_is_kept_and_reached() -> None:
    encoding = FixedPoint(2.0**24, 10)
    values = np.random.default_rng(0).uniform(-BOUND, BOUND, 10_000)
    found = encoding.decode(encoding.encode(values), 1)
    worst = float(np.abs(found - values).max())
    assert 0.9 * encoding.error < worst <= encoding.error
    assert FixedPoint(BOUND, 10).error < 1e-15  # ten clients, numbers up to 100


@pytest.mark.parametrize("terms", [1, 3, 10, 1000])
@pytest.mark.parametrize("bound", [1e-6, 1.0, 2.0**24, 1e9])
def test_the_largest_sum_does_not_overflow(bound: float, terms: int) -> None:
    encoding = FixedPoint(bound, terms)
    words = sum((encoding.encode(np.array([bound, -bound])) for _ in range(terms)), np.zeros(2, np.uint64))
    np.testing.assert_allclose(encoding.decode(words, terms), [terms * bound, -terms * bound], rtol=1e-12)


@pytest.mark.parametrize("value", [1.001 * BOUND, -1e300, np.inf, np.nan])
def test_what_does_not_fit_is_not_encoded(value: float) -> None:
    with pytest.raises(OutOfRange):
        FixedPoint(BOUND, 3).encode(np.array([0.0, value]))


def test_a_sum_that_cannot_be_is_refused() -> None:
    """A client that does not keep to the bound is seen if the sum leaves what is possible."""
    trial = Trial(4, 3)
    trial.run(until="share")
    trial.mask([0, 1, 2])
    liar = trial.participants[3]
    liar.open(trial.server.boxes(3))
    trial.server.masked(3, liar.mask(np.full(50, 2**62, np.uint64)))
    trial.confirm(range(4))
    trial.unmask(range(4))
    with pytest.raises(OutOfRange, match="a client has not kept to it"):
        trial.server.total(trial.encoding)


# -- what the server sees ----------------------------------------------------------------------------


def test_masked_vectors_look_random() -> None:
    """Bytes are uniform, also those of constant vectors; nothing correlates with a vector or a client."""
    length = 20_000
    trial = Trial(4, 3, length=length)
    trial.vectors = {k: np.full(length, 1.0) for k in range(3)} | {3: trial.vectors[3]}
    trial.run(until="mask")
    for words in trial.sent.values():
        counts = np.bincount(words.view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-6
        top = np.bincount((words >> np.uint64(56)).astype(int), minlength=256)
        assert stats.chisquare(top).pvalue > 1e-6
        neighbours = np.corrcoef(words[1:].astype(float), words[:-1].astype(float))[0, 1]
        assert abs(neighbours) < 5 / np.sqrt(length)
    numbers = {k: words.view(np.int64).astype(float) for k, words in trial.sent.items()}
    assert abs(np.corrcoef(numbers[3], trial.vectors[3])[0, 1]) < 5 / np.sqrt(length)
    for a, b in itertools.combinations(numbers.values(), 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(length)


def test_sums_of_fewer_clients_stay_masked() -> None:
    """What the server can add up without the shares, or with those of a completed sum, is random but for the
    sum itself."""
    length = 20_000
    trial = Trial(4, 3, length=length)
    trial.vectors = {k: np.full(length, 1.0) for k in range(4)}
    trial.run()
    for size in (1, 2, 3):
        for some in itertools.combinations(range(4), size):
            left = sum((trial.sent[k] for k in some), np.zeros(length, np.uint64))
            for k in some:  # the seeds are known once the sum is
                left = left - primitives.stream(trial.participants[k]._seed, trial.attempt.text, length)
            assert stats.chisquare(np.bincount(left.view(np.uint8), minlength=256)).pvalue > 1e-6


def test_no_two_masks_are_alike() -> None:
    first, second = Trial(3, 3), Trial(3, 3)
    for trial in (first, second):
        trial.run(until="mask")
    assert all((first.sent[k] != second.sent[k]).all() for k in range(3))


# -- lies --------------------------------------------------------------------------------------------


def test_a_wrong_share_is_found_out_and_not_used() -> None:
    trial = Trial(5, 4)
    trial.run(until="confirm")
    survivors = trial.server.survivors()
    for k in range(4):
        trial.server.revealed(k, trial.participants[k].unmask(survivors, {}))
    honest = trial.participants[4].unmask(survivors, {})
    lie = Revealed({k: share[:-1] + bytes([share[-1] ^ 1]) for k, share in honest.seeds.items()}, honest.keys)
    trial.server.revealed(4, lie)
    assert np.abs(trial.server.total(trial.encoding) - trial.plain()).max() <= 1e-12


@pytest.mark.parametrize("drops", [False, True])
def test_who_deals_shares_of_something_else_is_named(drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(5, 4)
    liar = trial.participants[2]
    trial.advertise(range(5))
    if drops:  # then its key is asked for
        monkeypatch.setattr(liar, "_mask_key", primitives.new_key())
    else:
        dealt = primitives.dealt
        monkeypatch.setattr(primitives, "dealt", lambda secret, *rest: dealt(
            secret[::-1] if secret == liar._seed else secret, *rest))
    trial.share(range(5))
    there = [0, 1, 3, 4] if drops else range(5)
    trial.mask(there)
    trial.confirm(there)
    trial.unmask(there)
    with pytest.raises(Liar, match="not of its") as error:
        trial.server.total(trial.encoding)
    assert error.value.client == 2


def test_boxes_that_cannot_be_read_are_told_with_the_name() -> None:
    trial = Trial(4, 3, authority=AUTHORITY)
    trial.run(until="share")
    boxes = trial.server.boxes(0)
    for wrong in (boxes[1], boxes[2][:-1] + b"A", b"", b"\xff"):  # of another client, changed, none
        with pytest.raises(Accusation, match="client 2: its shares cannot be read"):
            trial.participants[0].open(boxes | {2: wrong})


def test_a_client_without_keys_of_its_own_is_refused() -> None:
    trial = Trial(4, 3)
    trial.advertise(range(3))
    with pytest.raises(Rejected, match="keys of another client"):
        trial.server.advertised(3, trial.participants[0].advertise())


# -- an active server --------------------------------------------------------------------------------


def test_a_replayed_key_is_refused() -> None:
    """Keys of an earlier attempt at the same round, whose secrets the server may have."""
    people = [AUTHORITY.identity() for _ in range(4)]
    old = Trial(4, 3, authority=AUTHORITY, identities=people)
    new = Trial(4, 3, authority=AUTHORITY, identities=people, attempt=ATTEMPT._replace(token="another"))
    new.advertise([0, 1, 2])
    roster = new.server.roster() | {3: old.participants[3].advertise()}
    with pytest.raises(Accusation, match="client 3: the signature of its keys is not of this attempt"):
        new.participants[0].share(roster)
    with pytest.raises(Rejected, match="not of this attempt"):
        new.server.advertised(3, old.participants[3].advertise())


def test_a_key_replayed_where_nothing_is_signed_cannot_speak() -> None:
    """The server knows a client's mask key of an attempt in which it dropped out, and never its box key."""
    old, new = Trial(4, 3), Trial(4, 3, attempt=ATTEMPT._replace(token="another"))
    old.run(until="share")
    new.advertise([0, 1, 2])
    new.server.advertised(3, old.participants[3].advertise())
    new.share([0, 1, 2])
    boxes = new.server.boxes(0) | {3: old.server.boxes(0)[3]}
    with pytest.raises(Accusation, match="client 3: its shares cannot be read"):
        new.participants[0].open(boxes)


def test_a_server_cannot_make_up_clients() -> None:
    trial = Trial(3, 3, authority=AUTHORITY)
    trial.advertise([0, 1, 2])
    stranger, server = Authority().identity(), AUTHORITY.identity(ExtendedKeyUsageOID.SERVER_AUTH)
    for identity in (stranger, server):
        made_up = Participant(ATTEMPT, 3, 3, identity).advertise()
        with pytest.raises(Accusation, match="client 3: its keys are not certified"):
            trial.participants[0].share(trial.server.roster() | {3: made_up})
    with pytest.raises(Accusation, match="client 3: its keys are not certified"):
        trial.participants[0].share(trial.server.roster() | {3: Participant(ATTEMPT, 3, 3).advertise()})


def test_a_client_does_not_count_twice() -> None:
    one = AUTHORITY.identity()
    people = [AUTHORITY.identity(), AUTHORITY.identity(), one, one]
    trial = Trial(4, 3, authority=AUTHORITY, identities=people)
    trial.advertise(range(4))
    with pytest.raises(Rejected, match="two clients have the same key"):
        trial.participants[0].share(trial.server.roster())


def test_keys_that_the_server_changed_are_refused() -> None:
    trial = Trial(4, 3, authority=AUTHORITY)
    trial.advertise(range(4))
    roster = trial.server.roster()
    other = primitives.packed(primitives.new_key().public_key())
    with pytest.raises(Accusation, match="client 1"):
        trial.participants[0].share(roster | {1: roster[1]._replace(mask_key=other)})
    with pytest.raises(Rejected, match="this client's keys are not among"):
        trial.participants[0].share(roster | {0: roster[1]})


def test_no_client_reveals_for_two_lists_of_survivors() -> None:
    """Else the server would have one client's seed from some and its key from others."""
    for authority in (None, AUTHORITY):
        trial = Trial(6, 4, authority=authority)
        trial.run(until="confirm")
        survivors = trial.server.survivors()
        with pytest.raises(Rejected, match="asked for before, with something else"):
            trial.participants[0].unmask(survivors[:-1], trial.server.signatures())


def test_no_sum_of_few_is_unmasked() -> None:
    trial = Trial(6, 4)
    trial.run(until="mask")
    with pytest.raises(TooFew, match="a sum of 3 clients, and 4 are needed"):
        trial.participants[0].unmask([0, 1, 2], {})
    with pytest.raises(TooFew, match="a sum of 1 clients"):  # nor of one that is named often
        trial.participants[0].unmask([0, 0, 0, 0], {})
    with pytest.raises(Rejected, match="or without this one"):
        trial.participants[0].unmask([1, 2, 3, 4], {})


def test_nothing_is_revealed_before_enough_have_signed() -> None:
    trial = Trial(6, 4, authority=AUTHORITY)
    trial.run(until="confirm")
    survivors, signatures = trial.server.survivors(), trial.server.signatures()
    few = {k: signatures[k] for k in (0, 1, 2)}
    for given in ({}, few, few | {3: signatures[2]}, few | {3: b""}):
        with pytest.raises(TooFew, match="clients have signed who is in the sum, and 4 are needed"):
            trial.participants[0].unmask(survivors, given)
    other = Trial(6, 4, authority=AUTHORITY, identities=[p._identity for p in trial.participants.values()],
                  attempt=ATTEMPT._replace(number=2))  # signatures of another round do not count
    other.run(until="confirm")
    with pytest.raises(TooFew):
        trial.participants[0].unmask(survivors, few | {3: other.server.signatures()[3]})


@pytest.mark.slow
def test_split_views_never_give_a_seed_and_a_key() -> None:
    """By brute force over what a server tells each of five clients that do not talk to each other: client 4
    is in the sum, or is not. Never are there enough shares of both its seed and its key."""
    for told in itertools.product((True, False), repeat=4):
        trial = Trial(5, 3, length=2)
        trial.run(until="mask")
        seeds = keys = 0
        for k, inside in enumerate(told):
            found = trial.participants[k].unmask([0, 1, 2, 3, 4] if inside else [0, 1, 2, 3], {})
            seeds += 4 in found.seeds
            keys += 4 in found.keys
        seeds += 1  # client 4 itself is told that it is in
        assert seeds < 3 or keys < 3


def test_one_vector_is_masked_once() -> None:
    trial = Trial(3, 3)
    trial.run(until="mask")
    words = trial.encoding.encode(trial.vectors[1])
    np.testing.assert_array_equal(trial.participants[0].mask(words), trial.sent[0])


def test_phases_come_in_order() -> None:
    trial = Trial(3, 3)
    one = trial.participants[0]
    with pytest.raises(Rejected, match="'advertise' comes first"):
        one.share({})
    with pytest.raises(Rejected, match="'share' comes first"):
        one.open({})
    with pytest.raises(Rejected, match="'open' comes first"):
        one.mask(np.zeros(3, np.uint64))
    with pytest.raises(Rejected, match="'mask' comes first"):
        one.confirm([0, 1, 2])
