"""NCCL, for members on any hosts: gradients stay on the CUDA device, records and single messages go as with gloo."""

from __future__ import annotations

from everstep.base.ports import Transport
from everstep.exact.layout import GradientLayout
from everstep.parallel.group import GroupTransport
from everstep.parallel.kinds.gloo import meet
from everstep.parallel.kinds.kind import Site, TransportKind


def _pool(site: Site, layout: GradientLayout, name: str) -> Transport:
    common = (site.me, layout, site.n_lanes, site.meeting_place, site.tick)
    return GroupTransport(*common, "nccl", site.device, bind_host=site.bind_host, name=name)


KIND = TransportKind("nccl", ("cuda",), True, meet, _pool)
