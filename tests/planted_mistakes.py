"""Scripts with one mistake each, of the kinds that people make; `everstep check` has to name the object and the line.

Each line that may be named ends with MARK. The scripts have a common body; the fields are the places where their own
lines go.
"""

from __future__ import annotations

from typing import NamedTuple

MARK = "  # here"
_HEAD = """
import collections, copy, functools, glob, hashlib, itertools, os, random, socket, threading, time
import numpy as np
import torch
from torch import nn
import everstep

torch.manual_seed(0)
"""
_DATA = "data = [(torch.randn(4), torch.tensor(i % 2)) for i in range(24)]"
_MODEL = "model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))"
_OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"


class Planted(NamedTuple):
    """One script. object: a part of the name that a finding has to have."""

    name: str
    object: str
    setup: str = ""
    before: str = ""
    batch: str = ""
    loss: str = "nn.functional.cross_entropy(model(x), y)"
    after: str = ""
    given: str = ""
    data: str = _DATA
    model: str = _MODEL

    @property
    def text(self) -> str:
        """The whole script."""
        given = f", {self.given}" if self.given else ""
        lines = [_HEAD, self.data, self.model, _OPTIMIZER, self.setup]
        lines += [f"run = everstep.join(model, optimizer, data, lanes=2, micro_batch=2, epochs=3{given})"]
        lines += ["for step in run:", *_indented(self.before, 4), "    for x, y in step:", *_indented(self.batch, 8)]
        lines += [f"        step.backward({self.loss})", *_indented(self.after, 4), ""]
        return "\n".join(lines)

    @property
    def lines(self) -> set[int]:
        """Numbers of the marked lines."""
        return {k for k, line in enumerate(self.text.splitlines(), 1) if line.endswith(MARK)}


def _indented(text: str, by: int) -> list[str]:
    return [" " * by + line for line in text.strip("\n").splitlines()]


def _dataset(body: str, init: str = "pass") -> str:
    return f"""
class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(24, 4)
        {init}
    def __len__(self):
        return 24
    def __getitem__(self, i):
{chr(10).join(_indented(body, 8))}
data = Data()
"""


def _net(body: str, init: str = "pass", before: str = "") -> str:
    return f"""
{before}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)
        {init}
    def forward(self, x):
{chr(10).join(_indented(body, 8))}
model = Net()
"""


_AFTER_LR = "for g in optimizer.param_groups:\n    g['lr'] = "
PLANTED = (
    Planted(
        "scheduler outside join",
        "sched",
        setup="sched = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # here",
        after="sched.step()  # here",
    ),
    Planted(
        "average by hand",
        "ema",
        setup="ema = {n: p.detach().clone() for n, p in model.named_parameters()}  # here",
        after="for n, p in model.named_parameters():\n    ema[n].mul_(0.9).add_(p.detach(), alpha=0.1)  # here",
    ),
    Planted(
        "step counter",
        "count",
        setup="count = 0  # here",
        after="count += 1  # here\nif count > 2:\n    " + _AFTER_LR.replace("\n", "\n    ") + "0.01",
    ),
    Planted(
        "plateau by hand",
        "",
        setup="best, wait = 1e9, 0  # here",
        after="""
if step.loss < best:
    best, wait = step.loss, 0  # here
else:
    wait += 1  # here
if wait > 3:
    optimizer.param_groups[0]['lr'] *= 0.5
    wait = 0  # here
""",
    ),
    Planted(
        "early stopping by hand",
        "",
        setup="best, bad = float('inf'), 0  # here",
        after="""
if step.loss < best - 1e-3:
    best = step.loss  # here
    bad = 0  # here
else:
    bad += 1  # here
    if bad >= 5:
        break
""",
    ),
    Planted(
        "generator seeded by time",
        "gen",
        setup="gen = torch.Generator().manual_seed(time.time_ns())  # here",
        batch="x = x + 0.1 * torch.randn(x.shape, generator=gen)  # here",
    ),
    Planted(
        "dataset that changes between passes",
        "",
        data=_dataset("self.x[i] += 0.1  # here\nreturn self.x[i].clone(), torch.tensor(i % 2)"),
    ),
    Planted(
        "dataset with its own random state",
        "rng",
        data=_dataset(
            "noise = torch.from_numpy(self.rng.normal(size=4)).float()  # here\n"
            "return self.x[i] + noise, torch.tensor(i % 2)",
            "self.rng = np.random.default_rng(1)  # here",
        ),
    ),
    Planted("branch by RANK", "RANK", batch="if int(os.environ.get('RANK', 0)) > 0:  # here\n    x = x * 1.5"),
    Planted("branch by pid", "getpid", setup="odd = os.getpid() % 7  # here", batch="x = x * (1 + 0.1 * odd)"),
    Planted(
        "branch by host name",
        "gethostname",
        setup="scale = 1.0 + len(socket.gethostname()) * 0.01  # here",
        loss="nn.functional.cross_entropy(model(x), y) * scale",
    ),
    Planted(
        "update in place in forward",
        "",
        model=_net(
            "self.scale.add_(x.mean())  # here\nreturn self.b(torch.tanh(self.a(x)) * self.scale)",
            "self.scale = torch.ones(1)  # here",
        ),
    ),
    Planted(
        "parameter updated in forward",
        "",
        model=_net("with torch.no_grad():\n    self.a.weight.mul_(0.99)  # here\nreturn self.b(torch.tanh(self.a(x)))"),
    ),
    Planted(
        "cache in a module",
        "last",
        model=_net(
            "h = torch.tanh(self.a(x))\nif self.last is not None and self.last.shape == h.shape:\n"
            "    h = h + 0.1 * self.last\nself.last = h.detach()  # here\nreturn self.b(h)",
            "self.last = None  # here",
        ),
    ),
    Planted(
        "global list",
        "seen",
        setup="seen = []  # here",
        batch="seen.append(float(x.mean()))  # here\nx = x - sum(seen) / len(seen)",
    ),
    Planted(
        "dropout seeded by hand",
        "calls",
        setup="calls = 0  # here\ndef drop(x):\n    global calls\n    calls += 1  # here\n"
        "    torch.manual_seed(calls)  # here\n    return nn.functional.dropout(x, 0.5)",
        batch="x = drop(x)",
    ),
    Planted(
        "file written and read again",
        "",
        setup="open('scale.txt', 'w').write('1.0')  # here",
        after="""
scale = float(open('scale.txt').read())  # here
open('scale.txt', 'w').write(str(scale * 0.9))  # here
optimizer.param_groups[0]['lr'] = 0.1 * scale
""",
    ),
    Planted(
        "own numpy generator",
        "rng",
        setup="rng = np.random.RandomState(0)  # here",
        before="optimizer.param_groups[0]['lr'] = float(rng.uniform(0.01, 0.1))  # here",
    ),
    Planted(
        "own random.Random",
        "dice",
        setup="dice = random.Random(3)  # here",
        batch="x = x * (1 + dice.random())  # here",
    ),
    Planted(
        "mutable default argument",
        "",
        setup="def smooth(v, seen=[]):  # here\n    seen.append(float(v))  # here\n    return sum(seen) / len(seen)",
        after="optimizer.param_groups[0]['lr'] = 0.1 / (1 + smooth(step.loss))",
    ),
    Planted(
        "class attribute",
        "",
        setup="class Warm:\n    n = 0  # here\n    @classmethod\n    def lr(cls):\n        cls.n += 1  # here\n"
        "        return 0.1 * min(1.0, cls.n / 4)",
        before="optimizer.param_groups[0]['lr'] = Warm.lr()",
    ),
    Planted(
        "counter in a closure",
        "",
        setup="def make():\n    n = 0\n    def f():\n        nonlocal n\n        n += 1  # here\n        return n\n"
        "    return f\nnext_lr = make()  # here",
        before="optimizer.param_groups[0]['lr'] = 0.1 / next_lr()  # here",
    ),
    Planted(
        "lru_cache that is not pure",
        "",
        setup="@functools.lru_cache\ndef scale(k):  # here\n    return float(model[0].weight.detach().abs().mean())",
        before="optimizer.param_groups[0]['lr'] = 0.1 * scale(0)  # here",
    ),
    Planted(
        "param_groups by a counter",
        "k",
        setup="k = 0  # here",
        after="k += 1  # here\noptimizer.param_groups[0]['lr'] = 0.1 * 0.9 ** k",
    ),
    Planted(
        "augmentation by wall time",
        "time",
        batch="x = x * (1.0 + (time.time() % 1.0))  # here",
    ),
    Planted(
        "augmentation by wall time in the dataset",
        "time",
        data=_dataset("shift = time.perf_counter() % 0.5  # here\nreturn self.x[i] + shift, torch.tensor(i % 2)"),
    ),
    Planted(
        "weights changed after the batches by time",
        "time",
        after="with torch.no_grad():\n    model[0].weight.add_(1e-3 * (time.monotonic() % 1))  # here",
    ),
    Planted(
        "queue in a buffer",
        "queue",
        model=_net(
            "self.n += 1\nout = self.b(torch.tanh(self.a(x)) + self.queue.mean(0))\n"
            "self.queue[0] = self.a(x).detach().mean(0)  # here\nreturn out",
            "self.register_buffer('n', torch.tensor(0)); self.register_buffer('queue', torch.zeros(4, 3))",
        ),
    ),
    Planted(
        "generators seeded by chance",
        "torch.seed",
        batch="torch.seed()  # here\nx = x + 0.1 * torch.randn(x.shape)",
    ),
    Planted(
        "time budget",
        "time",
        setup="began = time.monotonic()  # here",
        after="if time.monotonic() - began > 600:  # here\n    break",
    ),
    Planted(
        "buffers changed by a count",
        "n",
        model=_net("return self.b(torch.tanh(self.a(x)) * self.s)", "self.register_buffer('s', torch.ones(1))"),
        setup="n = 0  # here",
        after="n += 1  # here\nmodel.s.fill_(1 + 0.1 * n)",
    ),
    Planted(
        "hash of a string",
        "hash",
        setup="salt = hash('everstep') % 100  # here",
        batch="x = x * (1 + salt / 100)",
    ),
    Planted(
        "order of a set",
        "",
        setup="names = {'alpha', 'beta', 'gamma', 'delta', 'epsilon', 'zeta'}  # here\n"
        "order = [len(n) for n in names]  # here",
        batch="x = x * (1 + sum(k * v for k, v in enumerate(order)) / 100)",
    ),
    Planted(
        "environment variable",
        "HOME",
        setup="lr = 0.1 * len(os.environ['HOME'])  # here\noptimizer.param_groups[0]['lr'] = lr",
    ),
    Planted(
        "thread",
        "",
        setup="""
box = {'v': 0.0}  # here
def work():
    while True:
        box['v'] += 1e-3  # here
        time.sleep(1e-4)
threading.Thread(target=work, daemon=True).start()
""",
        batch="x = x * (1 + box['v'])  # here",
    ),
    Planted(
        "gradient hook with state",
        "",
        setup="""
class Hook:
    def __init__(self):
        self.avg = torch.zeros(3, 4)  # here
    def __call__(self, grad):
        self.avg = 0.9 * self.avg + 0.1 * grad  # here
        return self.avg
model[0].weight.register_hook(Hook())  # here
""",
    ),
    Planted(
        "order of os.listdir",
        "listdir",
        setup="""
os.makedirs('parts', exist_ok=True)
for k in range(6):
    open(f'parts/{k * 7 % 6}.txt', 'w').write(str(k))
names = os.listdir('parts')  # here
data = [(torch.full((4,), float(open(f'parts/{n}').read())), torch.tensor(i % 2)) for i, n in enumerate(names)] * 4
""",
    ),
    Planted(
        "newest file",
        "os.stat",
        setup="newest = max((__file__, os.__file__), key=os.path.getmtime)  # here",
        batch="x = x * (2 if newest == __file__ else 1)",
    ),
    Planted(
        "BatchNorm momentum by a count",
        "i",
        model="model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))",
        setup="i = 0  # here",
        after="i += 1  # here\nmodel[1].momentum = 0.1 / i",
    ),
    Planted(
        "running mean beside the model",
        "mean",
        setup="mean = torch.zeros(4)  # here",
        batch="mean.mul_(0.9).add_(x.mean(0), alpha=0.1)  # here\nx = x - mean",
    ),
    Planted(
        "unseeded generator",
        "rng",
        setup="rng = np.random.default_rng()  # here",
        batch="x = x + float(rng.normal())  # here",
    ),
    Planted(
        "module that is swapped",
        "model[1]",
        after="if step.number == 2:\n    model[1] = nn.ReLU()  # here",
    ),
    Planted(
        "hook from a step on",
        "model[0]",
        after="if step.number == 2:\n    model[0].register_forward_hook(lambda m, i, o: o * 0.5)  # here",
    ),
    Planted(
        "secrets in collate",
        "secrets",
        setup="import secrets\ndef collate(samples):\n    x, y = torch.utils.data.default_collate(samples)\n"
        "    return x + secrets.randbelow(100) / 100, y  # here",
        given="collate=collate",
    ),
    Planted(
        "address of an object",
        "id",
        setup="class Thing:\n    pass\nthing = Thing()",
        batch="x = x * (1 + id(thing) % 1009 / 1009)  # here",
    ),
)

EXAMPLES = (
    "plain_loop.py",
    "my_task.py:Line",
    "mlp-digits",
    "ddpm_digits.py",
    "gan_digits.py",
    "graph_network.py",
    "hf_gpt2.py:GPT2",
    "hf_resnet.py:ResNet",
    "llama_bpe.py:Llama",
    "lora_gpt2.py",
    "nanogpt_loop.py",
)
"""Scripts and tasks, seen from the examples' folder, in which there is nothing to find."""
