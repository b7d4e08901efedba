"""gloo, for members on any hosts and gradients in host memory."""

from __future__ import annotations

from everstep.base.ports import Channel, Transport
from everstep.exact.layout import GradientLayout
from everstep.parallel.group import GroupTransport
from everstep.parallel.group_channel import GroupChannel
from everstep.parallel.kinds.kind import NO_GRADIENTS, Site, TransportKind


def _group(site: Site, layout: GradientLayout, name: str) -> GroupTransport:
    common = (site.me, layout, site.n_lanes, site.meeting_place, site.tick)
    return GroupTransport(*common, "gloo", "cpu", bind_host=site.bind_host, name=name)


def meet(site: Site) -> tuple[Transport, Channel]:
    """Records and single messages, by way of host memory wherever the tensors are."""
    records = _group(site, NO_GRADIENTS, "")
    return records, GroupChannel(site.me, records, device=site.device)


KIND = TransportKind("gloo", ("cpu",), True, meet, _group)
