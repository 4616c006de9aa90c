"""Flower: its own FedAvg in its simulator, with an actor of Ray for each core.

    python with_flower.py WORK CORES
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from session import Session, work_of_this_process

os.environ["PEERS_WORK"] = sys.argv[1]  # for the clients, which are in other processes

import flower_clients
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from networks import flat, network

WORK, SESSION, CORES = work_of_this_process(), Session("flwr", "ray", "torch"), int(sys.argv[2])


class Ended(Exception):
    """There is no further round."""


class Ordered(FedAvg):
    """FedAvg with a given cohort in each round, which begins when it is asked for."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
                        ) -> Iterable[Message]:
        if not SESSION.begin(lambda: flat(list(arrays.to_torch_state_dict().values()))):
            raise Ended
        nodes = sorted(grid.get_node_ids())
        return [Message(RecordDict({"arrays": arrays, "config": ConfigRecord(
                    {"client": int(client), "round": server_round - 1, "place": place})}),
                    dst_node_id=nodes[client], message_type=MessageType.TRAIN)
                for place, client in enumerate(WORK.cohorts[server_round - 1])]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]
                        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        averaged = super().aggregate_train(server_round, replies)
        told = [reply.content["metrics"] for reply in replies if reply.has_content()]
        SESSION.played(sum(int(each["steps"]) for each in told))
        return averaged


server = ServerApp()


@server.main()
def lead(grid: Grid, context: object) -> None:
    start = ArrayRecord(network(WORK.model, WORK.initial).state_dict())
    Ordered(fraction_train=WORK.cohort / len(WORK.x), fraction_evaluate=0.0,
            min_available_nodes=len(WORK.x)).start(grid, start, num_rounds=WORK.rounds + 1)


if __name__ == "__main__":
    try:
        run_simulation(server, flower_clients.app, num_supernodes=len(WORK.x), backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": CORES}})
    except BaseException:
        if not SESSION.has_ended:
            raise
