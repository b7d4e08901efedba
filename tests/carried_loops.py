"""Loops that keep something from round to round: those that lose it and train otherwise, and those that do no harm.

Most of them do it only after the steps that are rehearsed, so that the code alone can say so.
"""

from __future__ import annotations

from rehearsed_scripts import Loop

_PATIENCE = """
class Patience:
    def __init__(self):
        self.best, self.wait = 1e9, 0
    def update(self, loss):
        if loss < self.best:
            self.best, self.wait = loss, 0
        else:
            self.wait += 1
        return self.wait > 30
patience = Patience()
"""
_EMA = """
class Ema:
    def __init__(self, model):
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].mul_(0.9).add_(p.detach(), alpha=0.1)
"""
_DATASET = """
class Data:
    def __init__(self):
        self.level, self.seen, self.cache, self.index = 0, 0, {{}}, None
        self.rng = np.random.default_rng(3)
        self.log = []
    def __len__(self):
        return 32
    def __getitem__(self, i):
{lines}
data = Data()
"""


def dataset(*lines: str) -> str:
    """A dataset whose samples are made so."""
    return _DATASET.format(lines="\n".join(f"        {line}" for line in lines))


BAD = [
    Loop(
        "plateau",
        "best, wait = 1e9, 0",
        after="if step.loss < best: best, wait = step.loss, 0\n"
        "else: wait += 1\n"
        "if wait > 30:\n"
        "    halve()\n"
        "    wait = 0",
        refused=(
            "best",
            "wait",
        ),
    ),
    Loop(
        "patience",
        _PATIENCE,
        after="if patience.update(step.loss):\n    halve()",
        refused=(
            "patience.best",
            "patience.wait",
        ),
    ),
    Loop(
        "early_stop",
        _PATIENCE,
        after="if patience.update(step.loss):\n    break",
        refused=(
            "patience.best",
            "patience.wait",
        ),
    ),
    Loop(
        "stop_call",
        "bad = 0",
        after="bad = bad + 1 if step.loss > 9 else 0\nif bad > 5: run.stop()",
        refused=("bad",),
    ),
    Loop(
        "left_by_exit",
        "bad = 0",
        after="bad += step.loss > 9\nif bad > 5: sys.exit(0)",
        refused=("bad",),
    ),
    Loop(
        "ema_late",
        _EMA + "ema = None",
        after="if step.number == 5: ema = Ema(model)\nif step.number > 5: ema.update(model)",
        refused=("ema",),
    ),
    Loop(
        "ema_of_before",
        _EMA + "ema = Ema(model)",
        after="if step.number > 5: ema.update(model)",
        refused=("ema.shadow",),
    ),
    Loop(
        "swa_late",
        "swa = AveragedModel(model)",
        after="if step.number > 5: swa.update_parameters(model)",
        refused=("swa",),
    ),
    Loop(
        "ema_copied_late",
        "ema = None",
        after="if step.number == 5: ema = copy.deepcopy(model)\n"
        "if step.number > 5:\n"
        "    for e, p in zip(ema.parameters(), model.parameters()): e.data.lerp_(p.data, 0.1)",
        refused=("ema",),
    ),
    Loop(
        "loss_history",
        "losses = []",
        after="losses.append(step.loss)\nif len(losses) > 20 and losses[-1] > sum(losses[-20:-10]) / 10:\n    halve()",
        refused=("losses",),
    ),
    Loop(
        "deque",
        "last = collections.deque(maxlen=9)",
        after="last.append(step.loss)\nif sum(last) > 90:\n    halve()",
        refused=("last",),
    ),
    Loop(
        "loss_weight",
        "weight = 1.0",
        batch="x = x * weight",
        after="if step.loss > 5: weight = weight * 0.9",
        refused=("weight",),
    ),
    Loop(
        "loss_weights",
        "weights = torch.ones(2)",
        batch="x = x * weights.sum()",
        after="if step.number > 9: weights[0] *= 0.9",
        refused=("weights",),
    ),
    Loop(
        "weights_by_name",
        "weights = {'a': 1.0}",
        batch="x = x * weights['a']",
        after="if step.loss > 9: weights['a'] *= 0.5",
        refused=("weights",),
    ),
    Loop(
        "smoothed",
        "smooth = None",
        after="smooth = step.loss if smooth is None else 0.9 * smooth + 0.1 * step.loss\nif smooth > 9:\n    halve()",
        refused=("smooth",),
    ),
    Loop(
        "chain",
        "a = b = 0",
        after="a += 1\nb = a * 2\nc = b + 1\nif c > 90:\n    halve()",
        refused=("a",),
    ),
    Loop(
        "chain_of_rounds",
        "a = b = 0",
        batch="x = x + b",
        after="b = a\na = a + 1",
        refused=(
            "a",
            "b",
        ),
    ),
    Loop(
        "curriculum",
        dataset(
            "return torch.randn(4) * self.level, torch.tensor(i % 2)",
        ),
        after="if step.loss < 0.1: data.level += 1",
        refused=("data.level",),
    ),
    Loop(
        "counting",
        dataset(
            "self.seen += 1",
            "return torch.randn(4) * (self.seen > 900), torch.tensor(0)",
        ),
        refused=("data.seen",),
    ),
    Loop(
        "own_draws",
        dataset(
            "return torch.tensor(self.rng.random(4)).float() if i > 99 else torch.zeros(4), torch.tensor(0)",
        ),
        refused=("data.rng",),
    ),
    Loop(
        "first_drawn",
        dataset(
            "if i not in self.cache: self.cache[i] = torch.randn(4)",
            "return self.cache[i], torch.tensor(0)",
        ),
        refused=("data.cache",),
    ),
    Loop(
        "wrong_key",
        dataset(
            "if i % 7 not in self.cache: self.cache[i % 7] = torch.full((4,), float(i))",
            "return self.cache[i % 7], torch.tensor(0)",
        ),
        refused=("data.cache",),
    ),
    Loop(
        "grown_data",
        "data = list(data)",
        after="if step.loss > 9: data.append(data[0])",
        refused=("data",),
    ),
    Loop(
        "collating",
        "n = 0\n"
        "def collate(samples):\n"
        "    global n\n"
        "    n += 1\n"
        "    x, y = torch.utils.data.default_collate(samples)\n"
        "    return x * (n < 99), y",
        "collate=collate",
        refused=("n",),
    ),
    Loop(
        "cached",
        "level = 1.0\n@functools.lru_cache\ndef scaled(k):\n    return k * level",
        batch="x = x * scaled(2)",
        after="if step.number > 9: level = 2.0",
        refused=(
            "scaled",
            "level",
        ),
    ),
    Loop(
        "cached_draws",
        "@functools.cache\ndef noise(k):\n    return torch.randn(4)",
        batch="x = x + noise(step.number % 50)",
        refused=("noise",),
    ),
    Loop(
        "second_late",
        "other = nn.Linear(4, 2)\nsecond = torch.optim.Adam(other.parameters())",
        after="if step.number > 5: second.step()",
        refused=("second",),
    ),
    Loop(
        "generator",
        "rng = random.Random(1)",
        batch="if step.number > 9: x = x * rng.random()",
        refused=("rng",),
    ),
    Loop(
        "torch_generator",
        "g = torch.Generator().manual_seed(1)",
        batch="if step.number > 9: x = x + torch.rand(4, generator=g)",
        refused=("g",),
    ),
    Loop(
        "numpy_generator",
        "rng = np.random.default_rng(1)",
        batch="if step.number > 9: x = x * rng.normal()",
        refused=("rng",),
    ),
    Loop(
        "cycle",
        "turns = itertools.cycle([1, 2])",
        batch="x = x * turn if step.number > 9 else x",
        before="turn = next(turns)",
        refused=("turns",),
    ),
    Loop(
        "iterator",
        "more = iter(data)",
        after="if step.number > 9: x2, _ = next(more)",
        batch="x = x + (x2 if step.number > 10 else 0)",
        refused=(
            "more",
            "x2",
        ),
    ),
    Loop(
        "own_generator",
        "def rates():\n    while True:\n        yield 0.1\nrate = rates()",
        after="optimizer.param_groups[0]['lr'] = next(rate)",
        refused=("rate",),
    ),
    Loop(
        "file",
        "import pathlib\npath = 'rate.txt'",
        after="if step.number > 5:\n"
        "    with open(path) as f: optimizer.param_groups[0]['lr'] = float(f.read())\n"
        "pathlib.Path(path).write_text('0.1')",
        refused=("rate.txt",),
    ),
    Loop(
        "file_of_torch",
        after="torch.save(step.loss, 'loss.pt')\n"
        "if step.number > 5 and torch.load('loss.pt') > 9: optimizer.param_groups[0]['lr'] *= 0.5",
        refused=("loss.pt",),
    ),
    Loop(
        "flag",
        "warm = False",
        after="if step.loss < 0.01: warm = True",
        batch="if warm: x = x * 2",
        refused=("warm",),
    ),
    Loop(
        "first",
        "first = True",
        after="if first and step.loss < 9:\n    model[0].weight.data.mul_(2)\n    first = False",
        refused=("first",),
    ),
    Loop(
        "global_function",
        "n = 0\ndef bump():\n    global n\n    n += 1\n    return n",
        after="if bump() > 40:\n    halve()",
        refused=("n",),
    ),
    Loop(
        "closure",
        "def counter():\n"
        "    n = 0\n"
        "    def up():\n"
        "        nonlocal n\n"
        "        n += 1\n"
        "        return n\n"
        "    return up\n"
        "up = counter()",
        after="if up() > 40:\n    halve()",
        refused=("up.n",),
    ),
    Loop(
        "default_list",
        "def late(loss, seen=[]):\n    seen.append(loss)\n    return len(seen) > 40",
        after="if late(step.loss):\n    halve()",
        refused=("late.default0",),
    ),
    Loop(
        "class_counter",
        "class Seen:\n    n = 0",
        after="Seen.n += 1\nif Seen.n > 40:\n    halve()",
        refused=("Seen.n",),
    ),
    Loop(
        "hook",
        "scale = 1.0\nmodel[0].weight.register_hook(lambda grad: grad * scale)",
        after="if step.loss > 9: scale *= 0.5",
        refused=("scale",),
    ),
    Loop(
        "scheduler_function",
        "cut = 1.0\ns = lr_scheduler.LambdaLR(optimizer, lambda k: cut)",
        "scheduler=s",
        after="if step.loss > 9: cut *= 0.5",
        refused=("cut",),
    ),
    Loop(
        "scheduler_fed",
        "s = lr_scheduler.ReduceLROnPlateau(optimizer)\nsmooth = 0.0",
        "state={'s': s}",
        after="smooth = 0.9 * smooth + step.loss\ns.step(smooth)",
        refused=("smooth",),
    ),
    Loop(
        "clipped",
        "norms = []",
        after="norms.append(float(model[0].weight.norm()))\n"
        "if norms[-1] > 2 * norms[0]: model[0].weight.data.mul_(norms[0] / norms[-1])",
        refused=("norms",),
    ),
    Loop(
        "skipped",
        "n = 0",
        after="n += 1\nif n < 40: continue\nhalve()",
        refused=("n",),
    ),
    Loop(
        "evaluates",
        "n = 0",
        after="n += 1\nif n % 40 == 0: run.evaluate(lambda b: {'n': torch.tensor([1.0, 1.0])}, data)",
        refused=("n",),
    ),
    Loop(
        "shaken",
        "n = 0",
        after="n += 1\nif n == 40: nn.init.normal_(model[0].weight)",
        refused=("n",),
    ),
    Loop(
        "set_attribute",
        "p = 0.1\nmodel.insert(1, nn.Dropout(p))",
        after="if step.loss < 0.1:\n    p += 0.1\n    setattr(model[1], 'p', p)",
        refused=("p",),
    ),
    Loop(
        "match",
        "phase = 'warm'",
        after="match phase:\n"
        "    case 'warm':\n"
        "        phase = 'long' if step.loss < 1 else 'warm'\n"
        "    case _:\n"
        "        optimizer.param_groups[0]['lr'] = 0.01",
        refused=("phase",),
    ),
    Loop(
        "walrus",
        "n = 0",
        after="if (n := n + 1) > 40:\n    halve()",
        refused=("n",),
    ),
    Loop(
        "nested_attributes",
        "box = argparse.Namespace(inner=argparse.Namespace(n=0))",
        after="box.inner.n += 1\nif box.inner.n > 40:\n    halve()",
        refused=("box.inner.n",),
    ),
    Loop(
        "comprehension",
        "best = []",
        after="best = sorted([*best, step.loss])[:5]\noptimizer.param_groups[0]['lr'] = 0.1 * max(b for b in best)",
        refused=("best",),
    ),
    Loop(
        "memo_of_numbers",
        "class First(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.cache = {}\n"
        "    def forward(self, x):\n"
        "        n = x.shape[1]\n"
        "        if n not in self.cache: self.cache[n] = x.detach().mean()\n"
        "        return x * self.cache[n]\n"
        "model.append(First())",
        refused=("model.cache",),
    ),
]

CLEAN = [
    Loop(
        "counter",
        "n = 0",
        after="n += 1\nif n % 10: print(n)",
    ),
    Loop(
        "running_mean",
        "mean = 0.0",
        after="mean = 0.9 * mean + 0.1 * step.loss\nif step.number % 10 == 0: print(mean)",
    ),
    Loop(
        "best_saved",
        "best = 1e9",
        after="if step.loss < best:\n    best = step.loss\n    torch.save(model.state_dict(), 'best.pt')",
    ),
    Loop(
        "best_printed",
        "best = 1e9",
        after="best = min(best, step.loss)\nprint(f'{best:.3f}')",
    ),
    Loop(
        "norms",
        "norms = []",
        after="norms.append(sum(float(p.norm()) for p in model.parameters()))",
    ),
    Loop(
        "norms_by_name",
        "norms = collections.defaultdict(list)",
        after="for n, p in model.named_parameters(): norms[n].append(p.norm().item())",
    ),
    Loop(
        "timers",
        "t0 = time.time()\nspent = 0.0",
        after="spent += time.time() - t0\nt0 = time.time()\nprint(spent)",
    ),
    Loop(
        "bar",
        "class Bar:\n"
        "    def __init__(self): self.n = 0\n"
        "    def update(self, k=1):\n"
        "        self.n += k\n"
        "        print(self.n)\n"
        "bar = Bar()",
        after="bar.update()",
    ),
    Loop(
        "writer",
        "class Writer:\n"
        "    def __init__(self): self.rows, self.at = [], 0\n"
        "    def add_scalar(self, n, v, k):\n"
        "        self.at += 1\n"
        "        self.rows.append((n, v, k))\n"
        "writer = Writer()",
        after="writer.add_scalar('loss', step.loss, step.number)\n"
        "writer.add_scalar('lr', optimizer.param_groups[0]['lr'], step.number)",
    ),
    Loop(
        "memo",
        dataset(
            "if i not in self.cache: self.cache[i] = torch.full((4,), float(i))",
            "return self.cache[i], torch.tensor(i % 2)",
        ),
    ),
    Loop(
        "memo_returned",
        dataset(
            "if i in self.cache: return self.cache[i]",
            "x = torch.full((4,), float(i)), torch.tensor(i % 2)",
            "self.cache[i] = x",
            "return x",
        ),
    ),
    Loop(
        "memo_got",
        dataset(
            "x = self.cache.get(i)",
            "if x is None:",
            "    x = torch.full((4,), float(i))",
            "    self.cache[i] = x",
            "return x, torch.tensor(i % 2)",
        ),
    ),
    Loop(
        "memo_tried",
        dataset(
            "try:",
            "    return self.cache[i]",
            "except KeyError:",
            "    self.cache[i] = torch.full((4,), float(i)), torch.tensor(i % 2)",
            "    return self.cache[i]",
        ),
    ),
    Loop(
        "memo_set",
        dataset(
            "return self.cache.setdefault(i, torch.full((4,), float(i))), torch.tensor(i % 2)",
        ),
    ),
    Loop(
        "lazy",
        dataset(
            "if self.index is None: self.index = list(range(32))",
            "return torch.full((4,), float(self.index[i])), torch.tensor(i % 2)",
        ),
    ),
    Loop(
        "sample_log",
        dataset(
            "self.log.append(i)",
            "self.seen += 1",
            "return torch.full((4,), float(i)), torch.tensor(i % 2)",
        ),
    ),
    Loop(
        "level_by_step",
        dataset(
            "return torch.randn(4) * self.level, torch.tensor(i % 2)",
        ),
        before="data.level = step.number // 10",
    ),
    Loop(
        "cached",
        "@functools.lru_cache\ndef scale(k):\n    return 0.5 ** k",
        batch="x = x * scale(step.number // 10)",
    ),
    Loop(
        "cached_table",
        "@functools.cache\ndef table(n):\n    return torch.arange(n).float()",
        batch="x = x + table(4)",
    ),
    Loop(
        "memo_in_loop",
        "scales = {}",
        batch="if step.number not in scales: scales[step.number] = 0.5 ** step.number\nx = x * scales[step.number]",
    ),
    Loop(
        "hooked",
        "model[0].register_forward_hook(lambda m, given, out: out * 1.0)\n"
        "model[0].weight.register_hook(lambda grad: grad * 0.5)",
    ),
    Loop(
        "hook_counts",
        "seen = []\nmodel[0].weight.register_hook(lambda grad: seen.append(float(grad.norm())))",
    ),
    Loop(
        "counting_module",
        "class Counting(nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        return super().forward(x)\n"
        "model.append(Counting(2, 2))",
    ),
    Loop(
        "rotary",
        "class Rotary(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = None\n"
        "    def forward(self, x):\n"
        "        if self.table is None or self.table.size(0) < x.size(1): self.table = "
        "torch.arange(x.size(1)).float().cos()\n"
        "        return x * self.table[: x.size(1)]\n"
        "model.append(Rotary())",
    ),
    Loop(
        "rate_by_step",
        after="for g in optimizer.param_groups: g['lr'] = 0.1 if step.number < 10 else 0.01",
    ),
    Loop(
        "warmup",
        "base = [g['lr'] for g in optimizer.param_groups]",
        after="for g, lr in zip(optimizer.param_groups, base): g['lr'] = lr * min(1, step.number / 9)",
    ),
    Loop(
        "frozen_by_step",
        after="if step.number == 9:\n    for p in model[0].parameters(): p.requires_grad_(False)",
    ),
    Loop(
        "local_names",
        before="total = 0.0",
        batch="total = total + float(x.sum())\nscaled = x * total",
        after="print(total)",
    ),
    Loop(
        "carried",
        "kept = everstep.state(best=1e9, wait=0)",
        "state=kept",
        after="if step.loss < kept.best: kept.best, kept.wait = step.loss, 0\n"
        "else: kept.wait += 1\n"
        "if kept.wait > 30:\n"
        "    halve()",
    ),
    Loop(
        "carried_list",
        "kept = everstep.state(losses=[], by_name={'a': [1]})",
        "state={'kept': kept}",
        after="kept.losses.append(step.loss)\n"
        "kept.by_name['a'].append(2)\n"
        "if len(kept.losses) + len(kept.by_name['a']) > 30:\n"
        "    halve()",
    ),
    Loop(
        "carried_alias",
        "kept = everstep.state(losses=[])\nlosses = kept.losses",
        "state=kept",
        after="losses.append(step.loss)\nif sum(losses) > 30:\n    halve()",
    ),
    Loop(
        "carried_weights",
        "kept = everstep.state(weights=torch.ones(4))",
        "state=kept",
        batch="x = x * kept.weights",
        after="kept.weights.mul_(0.9)",
    ),
    Loop(
        "carried_rng",
        "kept = everstep.state(rng=random.Random(1))",
        "state=kept",
        batch="x = x * 1",
        after="optimizer.param_groups[0]['lr'] = 0.1 * kept.rng.random()",
    ),
    Loop(
        "carried_module",
        "kept = everstep.state(ema=copy.deepcopy(model))",
        "state=kept",
        after="for e, p in zip(kept.ema.parameters(), model.parameters()): e.data.lerp_(p.data, 0.1)",
    ),
    Loop(
        "ignored",
        "n = 0",
        "ignore=['n']",
        after="n += 1\nif n > 40:\n    halve()",
    ),
    Loop(
        "given_scheduler",
        "s = lr_scheduler.StepLR(optimizer, 2)",
        "scheduler=s",
        after="print(s.get_last_lr())",
    ),
    Loop(
        "stepped_scheduler",
        "s = lr_scheduler.ReduceLROnPlateau(optimizer)",
        "state={'s': s}",
        after="s.step(step.loss)",
    ),
    Loop(
        "evaluates",
        after="if step.number % 2 == 0: print(run.evaluate(lambda b: {'n': torch.tensor([1.0, 1.0])}, data))",
    ),
    Loop(
        "logger",
        "log = logging.getLogger('mine')\nrows = []",
        after="rows.append((step.number, step.loss))\nlog.info('%s', rows[-1])",
    ),
    Loop(
        "teacher",
        "teacher = copy.deepcopy(model).eval()",
        batch="with torch.no_grad(): soft = teacher(x).softmax(1)\nx = x + 0 * soft.sum()",
        after="teacher.eval()",
    ),
    Loop(
        "csv",
        "file = open(os.devnull, 'w')",
        after="file.write(f'{step.number},{step.loss}')\nfile.flush()",
    ),
    Loop(
        "json_log",
        "history = {'loss': []}",
        after="import json\nhistory['loss'].append(step.loss)\nwith open(os.devnull, 'w') as f: json.dump(history, f)",
    ),
    Loop(
        "meter",
        "class Meter:\n"
        "    def __init__(self): self.total, self.count = 0.0, 0\n"
        "    def add(self, v):\n"
        "        self.total += v\n"
        "        self.count += 1\n"
        "    @property\n"
        "    def mean(self): return self.total / self.count\n"
        "meter = Meter()",
        after="meter.add(step.loss)\nprint(meter.mean)",
    ),
    Loop(
        "nan_guard",
        "mean = 0.0",
        after="mean = mean + step.loss\nif mean != mean: raise ValueError('nan')",
    ),
    Loop(
        "confusion",
        "counts = torch.zeros(2, 2)",
        batch="with torch.no_grad():\n    for a, b in zip(y.tolist(), model(x).argmax(1).tolist()): counts[a, b] += 1",
    ),
    Loop(
        "seen_samples",
        "seen = set()",
        batch="seen.update(y.tolist())",
        after="print(len(seen))",
    ),
    Loop(
        "own_state",
        "class History:\n"
        "    best = 9.0\n"
        "    _losses = torch.zeros(0)\n"
        "    def state_dict(self): return {'losses': self._losses, 'more': (self.best,)}\n"
        "    def load_state_dict(self, state): self._losses, self.best = state['losses'], state['more'][0]\n"
        "history = History()",
        "state={'history': history}",
        after="history._losses = torch.cat([history._losses, torch.tensor([step.loss])])\n"
        "if step.number == 4: history.best = min(history.best, step.loss)\n"
        "optimizer.param_groups[0]['lr'] = 0.1 if history.best > 1 else 0.05",
    ),
    Loop(
        "memo_of_shapes",
        "class Rotary(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.cache = {}\n"
        "    def forward(self, x):\n"
        "        n = x.shape[1]\n"
        "        if n not in self.cache: self.cache[n] = torch.arange(n).float().cos()\n"
        "        return x * self.cache[n]\n"
        "model.append(Rotary())",
    ),
    Loop(
        "hook_shows",
        "acts = {}\nmodel[0].register_forward_hook(lambda m, given, out: acts.__setitem__('a', out.detach().mean()))",
        after="print(acts.get('a'))",
    ),
    Loop(
        "logged_by_a_thread",
        "import threading\nlog = []",
        after="t = threading.Thread(target=log.append, args=(step.loss,))\nt.start()\nt.join()\ndel t",
    ),
    Loop(
        "eta",
        "start = time.time()",
        after="print((time.time() - start) / step.number)",
    ),
    Loop(
        "criterion_counts",
        "class Criterion(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.calls = 0\n"
        "    def forward(self, given, wanted):\n"
        "        self.calls += 1\n"
        "        return nn.functional.cross_entropy(given, wanted)\n"
        "loss_fn = Criterion()",
    ),
    Loop(
        "warm_up",
        "warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)\n"
        "cos = lr_scheduler.CosineAnnealingLR(optimizer, 4)\n"
        "s = lr_scheduler.SequentialLR(optimizer, [warm, cos], [3])",
        "scheduler=s",
    ),
]
