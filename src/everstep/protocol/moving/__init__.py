"""State on its way between processes: which blocks are requested from whom, who gives them, and when it ends. Pure.

The machines take events and return effects. `train` carries the effects out on tensors and sockets, `sim` on
abstract blocks and a virtual network; neither decides anything about them.

- `taker`: takes the state of some stages: to settle, to go back or to follow.
- `giver`: gives state: the shelf for members that settle, offers for joiners, and the steps fed to them afterwards.
- `memory_retention`: snapshots of stages that stay in memory.
- `chunks`: the blocks that each source is asked for next.
"""
