"""State on its way from one process to another: who asks whom for which blocks, who gives what, and when it ends. Pure.

The machines take events and return effects. `train` carries the effects out on tensors and sockets, `sim` on abstract
blocks and a virtual network; neither decides anything of this itself.

- `taker`: one that takes the state of some stages, to settle, to go back or to follow.
- `giver`: one that gives: the shelf for members that settle, offers for joiners, and what they are fed afterwards.
- `memory_retention`: which snapshots of stages stay in memory.
- `chunks`: which blocks are asked of which source next.
"""
