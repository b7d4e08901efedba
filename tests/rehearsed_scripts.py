"""Scripts as people write them, with what their loops keep beside what `join` carries.

Each is (name, setup, join's further arguments, before the batches, for each batch, after them, refused, listed):
`refused` are the names that must keep a job from beginning, `listed` those that only `everstep check` tells of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HEAD = """
import argparse, collections, copy, dataclasses, functools, itertools, logging, os, queue, random, sys, time
import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
import everstep

torch.manual_seed(0)
data = [(torch.randn(4), torch.tensor(i % 2)) for i in range(32)]
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = nn.functional.cross_entropy
def halve():
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
"""


class Loop(NamedTuple):
    """One script with the usual loop; the fields are the places where its own lines go."""

    name: str
    setup: str = ""
    given: str = ""
    before: str = ""
    batch: str = ""
    after: str = ""
    refused: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole script."""
        given = f", {self.given}" if self.given else ""
        lines = [
            HEAD,
            self.setup,
            f"run = everstep.join(model, optimizer, data, lanes=2, micro_batch=2, steps=6{given})",
        ]
        lines += ["for step in run:", *_indented(self.before, 4), "    for x, y in step:", *_indented(self.batch, 8)]
        lines += ["        step.backward(loss_fn(model(x), y))", *_indented(self.after, 4)]
        return "\n".join([*lines, "raise SystemExit('beyond the loop')", ""])


class Whole(NamedTuple):
    """A script with a shape of its own."""

    name: str
    body: str
    refused: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole script."""
        return HEAD + self.body


def combined(name: str, loops: Sequence[Loop]) -> Loop:
    """All of these in one script."""
    parts = zip(*((s.setup, s.before, s.batch, s.after) for s in loops), strict=True)
    setup, before, batch, after = ("\n".join(lines) for lines in parts)
    listed = tuple(name for loop in loops for name in loop.listed)
    return Loop(name, setup, before=before, batch=batch, after=after, listed=listed)


def _indented(text: str, by: int) -> list[str]:
    return [" " * by + line for line in text.splitlines()]


_HAND_EMA = """
class Ema:
    def __init__(self, model):
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].mul_(0.9).add_(p.detach(), alpha=0.1)
"""
_STATEFUL_EMA = (
    _HAND_EMA
    + """
    def state_dict(self):
        return dict(self.shadow)
    def load_state_dict(self, state):
        self.shadow = dict(state)
ema = Ema(model)
"""
)
_COUNTING_AVERAGE = """
class Average(nn.Module):
    n = 0
    def __init__(self, model):
        super().__init__()
        self.net, self.calls = copy.deepcopy(model), 0
    def forward(self, x):
        self.calls += 1
        return self.net(x)
    @torch.no_grad()
    def follow(self, model):
        self.n += 1
        self.train(self.n % 2 == 0)
        for mine, p in zip(self.net.parameters(), model.parameters()):
            mine.lerp_(p, 1 / (self.n + self.training))
ema = Average(model)
"""
_COUNTER = """
class Counter:
    def __init__(self):
        self.n = 0
    def step(self):
        self.n += 1
counter = Counter()
"""
_METER = """
class Meter:
    def __init__(self):
        self.reset()
    def reset(self):
        self.total, self.count = torch.zeros(()), 0
    def update(self, value):
        self.total += value
        self.count += 1
    def compute(self):
        return self.total / self.count
meter = Meter()
"""
_TORCH_METER = """
class Accuracy(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("hits", torch.zeros(()))
    def reset(self):
        self.hits.zero_()
    def update(self, logits, y):
        self.hits += (logits.argmax(1) == y).sum()
    def compute(self):
        return self.hits
meter = Accuracy()
"""
_STOPPING = """
class EarlyStopping:
    def __init__(self):
        self.best, self.bad = float("inf"), 0
    def __call__(self, loss):
        self.bad += 1
        self.best = min(self.best, loss - self.bad)
        return False
stopping = EarlyStopping()
"""
_BAR = """
class Bar:
    def __init__(self, total):
        self.n, self.total, self.began = 0, total, time.time()
    def update(self, k=1):
        self.n += k
        print(f"{self.n}/{self.total} {time.time() - self.began:.3f}")
bar = Bar(6)
"""
_TIMER = """
class Timer:
    def __init__(self):
        self.began = self.last = time.time()
        self.text = time.strftime("%X")
    def step(self):
        self.last, self.text = time.time(), f"{time.perf_counter()}"
timer = Timer()
"""
_DATASET = """
class Drawing:
    def __init__(self):
        self.rng = random.Random(3)
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return torch.randn(4) + self.rng.random(), torch.tensor(i % 2)
data = Drawing()
"""
_SECOND = (
    "other = nn.Linear(4, 2)\nsecond = torch.optim.Adam(other.parameters(), lr=0.01)\n"
    "x2, y2 = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)\n"
)
_TRAIN_SECOND = "second.zero_grad(); loss_fn(other(x2), y2).backward(inputs=list(other.parameters())); second.step()"
_IN_BATCHES = "torch.autograd.backward(loss_fn(other(x), y), inputs=list(other.parameters()))"

LOOPS = [
    Loop("plain"),
    Loop("plateau", "s = lr_scheduler.ReduceLROnPlateau(optimizer)", after="s.step(step.loss)", refused=("s",)),
    Loop(
        "plateau_given",
        "s = lr_scheduler.ReduceLROnPlateau(optimizer)",
        "state={'s': s}",
        after="s.step(step.loss)",
    ),
    Loop("scheduler_given", "s = lr_scheduler.StepLR(optimizer, 2)", "scheduler=s"),
    Loop("scheduler_own", "s = lr_scheduler.StepLR(optimizer, 2)", "state={'s': s}", after="s.step()"),
    Loop("averaged", "ema = AveragedModel(model)", after="ema.update_parameters(model)", refused=("ema",)),
    Loop("averaged_given", "ema = AveragedModel(model)", "state={'ema': ema}", after="ema.update_parameters(model)"),
    Loop(
        "average_that_counts_given",
        _COUNTING_AVERAGE,
        "state={'ema': ema}",
        batch="x = x + ema(x).mean().detach() * 0",
        after="ema.follow(model)",
    ),
    Loop("ema_object", _HAND_EMA + "ema = Ema(model)", after="ema.update(model)", refused=("ema.shadow",)),
    Loop("ema_given", _STATEFUL_EMA, "state={'ema': ema}", after="ema.update(model)"),
    Loop(
        "ema_dict",
        "ema = {n: p.detach().clone() for n, p in model.named_parameters()}",
        after="for n, p in model.named_parameters(): ema[n] = 0.9 * ema[n] + 0.1 * p.detach()",
        refused=("ema",),
    ),
    Loop(
        "ema_vector",
        "ema = nn.utils.parameters_to_vector(model.parameters()).detach().clone()",
        after="ema.lerp_(nn.utils.parameters_to_vector(model.parameters()).detach(), 0.1)",
        refused=("ema",),
    ),
    Loop(
        "ema_closure",
        "def averaging():\n    kept = copy.deepcopy(model)\n    def update():\n        with torch.no_grad():\n"
        "            for e, p in zip(kept.parameters(), model.parameters()):\n                e.lerp_(p, 0.1)\n"
        "    return update\nupdate = averaging()",
        after="update()",
        refused=("update.kept",),
    ),
    Loop(
        "second_optimizer",
        _SECOND,
        after=_TRAIN_SECOND,
        refused=("other", "second"),
    ),
    Loop(
        "second_given",
        _SECOND,
        "state={'other': other, 'second': second}",
        after=_TRAIN_SECOND,
    ),
    Loop(  # the first lane of each life is computed twice, so what a batch adds up depends on lives
        "second_in_batches",
        _SECOND,
        "state={'other': other, 'second': second}",
        batch=_IN_BATCHES,
        after="second.step(); second.zero_grad()",
        refused=("what is trained",),
    ),
    Loop("scaler", "scaler = torch.amp.GradScaler('cpu', enabled=False)", after="scaler.state_dict()"),
    Loop("scaler_on", "scaler = torch.amp.GradScaler('cpu')", before="scaler.scale(torch.ones(()))"),
    Loop("random", "rng = random.Random(1)", after="noise = rng.random()", refused=("rng",), listed=("noise",)),
    Loop("random_ignored", "rng = random.Random(1)", "ignore=[rng, 'noise']", after="noise = rng.random()"),
    Loop("numpy", "rng = np.random.default_rng(1)", after="rng.normal()", refused=("rng",)),
    Loop("torch_generator", "g = torch.Generator().manual_seed(1)", after="torch.rand(2, generator=g)", refused=("g",)),
    Loop("global_draws", after="a, b, c = random.random(), np.random.rand(), torch.rand(2)"),
    Loop("unseeded", "rng = np.random.default_rng()", after="rng.normal()"),
    Loop("counter_object", _COUNTER, after="counter.step()", refused=("counter",)),
    Loop("counter_ignored", _COUNTER, "ignore=['counter']", after="counter.step()"),
    Loop("global_function", "n = 0\ndef bump():\n    global n\n    n += 1\n", after="bump()", listed=("n",)),
    Loop("dataset", _DATASET, refused=("data.rng",), listed=("x",)),
    Loop(
        "loader_outside",
        "more = iter(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))",
        after="extra = next(more)",
        listed=("more", "extra"),
    ),
    Loop(
        "loader_feeds",
        "more = iter(torch.utils.data.DataLoader(data, batch_size=2))\nx2 = torch.zeros(2, 4)",
        batch="x = x + 0.1 * x2",
        after="x2, _ = next(more)",
        refused=("more", "x2"),
        listed=("x",),
    ),
    Loop("eval_mode", after="if step.number == 1: model.eval()"),
    Loop("torch_meter", _TORCH_METER, batch="meter.update(model(x), y)", listed=("meter",)),
    Loop("local_tensors", before="seen = torch.zeros(3)", batch="seen += 1", after="norm = model[0].weight.norm()"),
]

SHOWN = [
    Loop("counter", "n = 0", after="n += 1", listed=("n",)),
    Loop(
        "default_argument",
        "def note(loss, seen=[]):\n    seen.append(loss)",
        after="note(step.loss)",
        listed=("note.default0",),
    ),
    Loop("class_counter", "class Seen:\n    n = 0", after="Seen.n += 1", listed=("Seen.n",)),
    Loop("losses", "losses = []", after="losses.append(step.loss)", listed=("losses",)),
    Loop("running", "running = 0.0", after="running += step.loss", listed=("running",)),
    Loop(
        "defaultdict", "seen = collections.defaultdict(list)", after="seen['loss'].append(step.loss)", listed=("seen",)
    ),
    Loop("deque", "last = collections.deque(maxlen=9)", after="last.append(step.loss)", listed=("last",)),
    Loop("queue", "q = queue.Queue()", after="q.put(step.loss)", listed=("q.queue", "q.unfinished_tasks")),
    Loop("meter", _METER, after="meter.update(step.loss)", listed=("meter",)),
    Loop("early_stopping", _STOPPING, after="stopping(step.loss)", listed=("stopping.best", "stopping.bad")),
    Loop("bar", _BAR, after="bar.update()", listed=("bar.n",)),
    Loop("timer", _TIMER, before="t0 = time.time()", after="timer.step(); took = time.time() - t0"),
    Loop(
        "logger", "log = logging.getLogger('mine')\nlog.addHandler(logging.StreamHandler())", after="log.warning('x')"
    ),
    Loop(
        "profiler",
        "p = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])\np.start()",
        after="p.step()",
    ),
    Loop("cycle", "turns = itertools.cycle([1, 2, 3, 4, 5])", after="turn = next(turns)", listed=("turns", "turn")),
    Loop(
        "generator_function",
        "def gen():\n    k = 0\n    while True:\n        yield k\n        k += 1\nit = gen()",
        after="next(it)",
        listed=("it",),
    ),
    Loop("evaluates", after="run.evaluate(lambda b: {'n': torch.tensor([1.0, 1.0])}, data)"),
    Loop("enumerated", "k = 0", after="pass"),
    Loop(
        "partial",
        "def f(c, v):\n    c.append(v)\ng = functools.partial(f, [])",
        after="g(step.loss)",
        listed=("g.args",),
    ),
]
"""What people keep to look at; no two use the same names, so one script can have all of it."""

WHOLE = [
    Whole(
        "trainer",
        """
@dataclasses.dataclass
class Trainer:
    model: nn.Module
    history: list = dataclasses.field(default_factory=list)
    count: int = 0

    def __post_init__(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.ema = copy.deepcopy(self.model)

    def step(self, x, y):
        return loss_fn(self.model(x), y)

    def fit(self):
        self.run = everstep.join(self.model, self.optimizer, data, lanes=2, micro_batch=2, steps=6)
        for self.now in self.run:
            for x, y in self.now:
                self.now.backward(self.step(x, y))
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), self.model.parameters()):
                    e.lerp_(p, 0.1)
            self.history.append(self.now.loss)
            self.count += 1

def main():
    trainer = Trainer(model)
    trainer.fit()

if __name__ == "__main__":
    main()
""",
        refused=("self.ema",),
        listed=("self.history", "self.count"),
    ),
    Whole(
        "arguments",
        """
def main(arguments):
    net = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=arguments.lr)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 9)
    run = everstep.join(net, optimizer, data, lanes=2, micro_batch=2, steps=6, scheduler=scheduler)
    for k, step in enumerate(run):
        for x, y in step:
            step.backward(loss_fn(net(x), y))
        if run.is_main:
            print(step.number, step.loss)
    raise SystemExit("beyond the loop")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    main(parser.parse_args())
""",
        listed=("k",),
    ),
]

SCRIPTS: list[Loop | Whole] = [*LOOPS, *WHOLE, combined("shown", SHOWN)]
