"""Streams between workers of two hosts: bytes in the clear, with tags of our own (as without TLS), and over TLS 1.3.

    python bench/peer_streams.py [--out FILE] [--repeats N] [--mb 256]

Two processes; one sends runs of bytes over a peer connection, as a donor does, the other receives them. The kinds
alternate in each round. Gigabytes (1e9) per second of the receiver's clock, and processor seconds of both ends per
gigabyte: medians and quartiles. "set_up_ms": from the call to the answer to a first request, handshakes included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from everstep.base.config_keys import TlsConfig
from everstep.runtime.link.peer import PeerConnection, PeerServer, peer_connect
from everstep.runtime.link.tls import Tls, shown_by

KEY = b"k" * 32
ADDRESS = {"clear": "127.0.0.1", "tags": "127.0.0.2", "tls": "127.0.0.2"}
"""Callers come from the first; the second counts as another host."""
SET_UPS = 20


def tls_of(kind: str) -> Tls | None:
    """Both ends of a kind show the same certificate here."""
    return Tls.of(shown_by(TlsConfig("on"), KEY, ADDRESS[kind])) if kind == "tls" else None


def serve(size: int, connection: Connection) -> None:
    content = os.urandom(size)

    def handle(peer: PeerConnection, request: dict[str, Any]) -> None:
        peer.send_json("here")
        if request.get("bytes"):
            peer.recv_json()
            begin = time.process_time()
            peer.send_bytes([content])
            peer.recv_json()
            peer.send_json(time.process_time() - begin)

    servers = {kind: PeerServer(address, KEY, handle, tls_of(kind)) for kind, address in ADDRESS.items()}
    connection.send({kind: server.address for kind, server in servers.items()})
    connection.recv()
    for server in servers.values():
        server.close()


def receive(address: str, tls: Tls | None, out: bytearray) -> tuple[float, float]:
    """Gigabytes per second, and processor seconds per gigabyte."""
    with peer_connect(address, KEY, {"bytes": True}, tls=tls) as peer:
        peer.recv_json()
        cpu, wall = time.process_time(), time.perf_counter()
        peer.send_json("go")
        peer.recv_into(out)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peer.send_json("done")
        cpu += peer.recv_json()
    return len(out) / wall / 1e9, cpu / len(out) * 1e9


def set_up_ms(address: str, tls: Tls | None) -> float:
    begin = time.perf_counter()
    with peer_connect(address, KEY, {}, tls=tls) as peer:
        peer.recv_json()
    return (time.perf_counter() - begin) * 1e3


def spread(values: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--mb", type=int, default=256)
    options = parser.parse_args()
    ours, theirs = mp.get_context("spawn").Pipe()
    server = mp.get_context("spawn").Process(target=serve, args=(options.mb << 20, theirs), daemon=True)
    server.start()
    addresses, out = ours.recv(), bytearray(options.mb << 20)
    shown = {kind: tls_of(kind) for kind in ADDRESS}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in ADDRESS}
    for number in range(options.repeats + 1):
        for kind in ADDRESS:
            figures = receive(addresses[kind], shown[kind], out)
            if number:  # the first one warms up
                found[kind].append(figures)
    report: dict[str, Any] = {"bench": "peer_streams", "mb": options.mb, "repeats": options.repeats}
    for kind, figures in found.items():
        starts = [set_up_ms(addresses[kind], shown[kind]) for _ in range(SET_UPS)]
        rate, cost = ([figure[k] for figure in figures] for k in (0, 1))
        report[kind] = {"gb_per_s": spread(rate), "cpu_s_per_gb": spread(cost), "set_up_ms": spread(starts)}
    ours.send("over")
    server.join()
    text = json.dumps({**report, "cpus": os.cpu_count()}, indent=2)
    print(text)
    if options.out:
        with open(options.out, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
