"""Loops whose state reaches the training on ways that are easily overlooked; `harmless_loops` has some that look alike.

The training depends on what is carried by a shortcut, an exception, a table of functions, an operator, a decorator, a
hook, an optimizer of the user's own, a function that is exchanged.
"""

from __future__ import annotations

from rehearsed_scripts import Loop

BAD = [
    Loop(
        "items_not_all_set_in_a_counted_loop",
        setup="w = [1.0, 1.0, 1.0]",
        batch="x = x * w[2]",
        after="for k in range(2):\n    w[k] = step.loss\nw[2] = w[2] + w[1]",
        refused=("w",),
    ),
    Loop(
        "set_on_the_own_module",
        setup="scale = 1.0",
        batch="x = x * scale",
        after="setattr(sys.modules[__name__], 'scale', scale * 0.9)",
        refused=("scale",),
    ),
    Loop(
        "set_in_globals",
        setup="scale = 1.0",
        batch="x = x * scale",
        after="globals()['scale'] *= 0.9",
        refused=("scale",),
    ),
    Loop(
        "updated_globals",
        setup="scale = 1.0",
        batch="x = x * scale",
        after="globals().update(scale=scale * 0.9)",
        refused=("scale",),
    ),
    Loop(
        "set_in_globals_by_a_function",
        setup="scale = 1.0\ndef shrink():\n    names = globals()\n    names['scale'] = names['scale'] * 0.9",
        batch="x = x * scale",
        after="shrink()",
        refused=("scale",),
    ),
    Loop(
        "set_by_a_computed_name",
        setup="scale = 1.0\nname = 'sca' + 'le'",
        batch="x = x * scale",
        after="globals()[name] = scale * 0.9",
        refused=("globals()[...]",),
    ),
    Loop(
        "loss_defined_anew",
        setup="def criterion(y, x): return loss_fn(y, x)",
        batch="step.backward(criterion(model(x), y))",
        after="if step.number == 5:\n    def criterion(y, x):\n        return 2 * loss_fn(y, x)",
        refused=("criterion",),
    ),
    Loop(
        "and_shortcut",
        setup="wait = 0",
        after="wait += 1\nwait > 9 and halve()",
        refused=("wait",),
    ),
    Loop(
        "or_shortcut",
        setup="wait = 0",
        after="wait += 1\nwait <= 9 or halve()",
        refused=("wait",),
    ),
    Loop(
        "ternary_call",
        setup="wait = 0",
        after="wait += 1\nhalve() if wait > 9 else None",
        refused=("wait",),
    ),
    Loop(
        "comp_call",
        setup="wait = 0",
        after="wait += 1\n[halve() for _ in range(wait // 9)]",
        refused=("wait",),
    ),
    Loop(
        "comp_filter",
        setup="wait = 0",
        after="wait += 1\n[halve() for g in (1,) if wait > 9]",
        refused=("wait",),
    ),
    Loop(
        "raise_handler",
        setup="wait = 0\nclass Plateau(Exception): pass",
        after="wait += 1\ntry:\n    if wait > 9: raise Plateau\nexcept Plateau:\n    halve()",
        refused=("wait",),
    ),
    Loop(
        "raise_deep",
        setup="class Plateau(Exception): pass\n"
        "class Stop:\n"
        "    n = 0\n"
        "    def check(self):\n"
        "        self.n += 1\n"
        "        if self.n > 9: raise Plateau\n"
        "stop = Stop()",
        after="try:\n    stop.check()\nexcept Plateau:\n    halve()",
        refused=("stop.n",),
    ),
    Loop(
        "try_else",
        setup="wait = 0",
        after="wait += 1\n"
        "try:\n"
        "    assert wait < 9\n"
        "except AssertionError:\n"
        "    pass\n"
        "else:\n"
        "    optimizer.param_groups[0]['lr'] *= 0.99",
        refused=("wait",),
    ),
    Loop(
        "pop_rates",
        setup="rates = [0.1] * 9",
        after="try:\n    rates.pop()\nexcept IndexError:\n    halve()",
        refused=("rates",),
    ),
    Loop(
        "key_error",
        setup="left = {k: 1 for k in range(9)}\nn = 0",
        after="n += 1\ntry:\n    left[n]\nexcept KeyError:\n    halve()",
        refused=("n",),
    ),
    Loop(
        "stop_iteration",
        setup="it = iter(range(9))",
        after="try:\n    next(it)\nexcept StopIteration:\n    halve()",
        refused=("it",),
    ),
    Loop(
        "dispatch_dict",
        setup="phase = 'warm'\nn = 0\ndef nothing(): pass\nacts = {'warm': nothing, 'cool': halve}",
        after="n += 1\nif n > 9: phase = 'cool'\nacts[phase]()",
        refused=("n", "phase"),
    ),
    Loop(
        "dispatch_bool",
        setup="n = 0",
        after="n += 1\n{True: halve, False: lambda: None}[n > 9]()",
        refused=("n",),
    ),
    Loop(
        "dispatch_list",
        setup="n = 0",
        after="n += 1\n(lambda: None, halve)[n > 9]()",
        refused=("n",),
    ),
    Loop(
        "dispatch_getattr",
        setup="class Acts:\n"
        "    phase = 'warm'\n"
        "    n = 0\n"
        "    def warm(self): pass\n"
        "    def cool(self): halve()\n"
        "    def tick(self):\n"
        "        self.n += 1\n"
        "        if self.n > 9: self.phase = 'cool'\n"
        "        getattr(self, self.phase)()\n"
        "acts = Acts()",
        after="acts.tick()",
        refused=("acts.n", "acts.phase"),
    ),
    Loop(
        "super_step",
        setup="class Base:\n"
        "    k = 1.0\n"
        "    def step(self):\n"
        "        for g in optimizer.param_groups: g['lr'] = 0.1 * self.k\n"
        "class Mine(Base):\n"
        "    n = 0\n"
        "    def step(self):\n"
        "        self.n += 1\n"
        "        if self.n > 9: self.k = 0.5\n"
        "        super().step()\n"
        "mine = Mine()",
        after="mine.step()",
        refused=("mine.n", "mine.k"),
    ),
    Loop(
        "property_setter",
        setup="class Sched:\n"
        "    @property\n"
        "    def lr(self): return optimizer.param_groups[0]['lr']\n"
        "    @lr.setter\n"
        "    def lr(self, v): optimizer.param_groups[0]['lr'] = v\n"
        "sched = Sched()\n"
        "n = 0",
        after="n += 1\nsched.lr = 0.1 if n < 9 else 0.02",
        refused=("n",),
    ),
    Loop(
        "grl_alpha",
        setup="class Rev(torch.autograd.Function):\n"
        "    alpha = 0.0\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): return x.view_as(x)\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): return g * (1 + Rev.alpha)",
        batch="x = Rev.apply(x.requires_grad_())\nx = x * Rev.apply(model[0].bias).sum()",
        after="if step.loss < 9 and step.number > 5: Rev.alpha = Rev.alpha + 0.05",
        refused=("Rev.alpha",),
    ),
    Loop(
        "own_optimizer",
        setup="class Own(torch.optim.SGD):\n"
        "    @torch.no_grad()\n"
        "    def step(self, closure=None):\n"
        "        for g in self.param_groups:\n"
        "            for p in g['params']: p -= 0.1 * cfg.factor * p.grad\n"
        "cfg = argparse.Namespace(factor=1.0)\n"
        "optimizer = Own(model.parameters(), lr=0.1)\n"
        "n = 0",
        after="n += 1\nif n > 9: cfg.factor = 0.5",
        refused=("n", "cfg.factor"),
    ),
    Loop(
        "own_optimizer_plain",
        setup="class Own(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        for g in self.param_groups: g['lr'] = 0.1 * cfg.factor\n"
        "        return super().step(closure)\n"
        "cfg = argparse.Namespace(factor=1.0)\n"
        "optimizer = Own(model.parameters(), lr=0.1)\n"
        "n = 0",
        after="n += 1\nif n > 9: cfg.factor = 0.5",
        refused=("n", "cfg.factor"),
    ),
    Loop(
        "weight_alias",
        setup="w = model[0].weight.data\nscale = 1.0",
        after="scale *= 0.98\nif step.number > 5: w.mul_(scale)",
        refused=("scale",),
    ),
    Loop(
        "state_dict_alias",
        setup="live = model.state_dict()\nn = 0",
        after="n += 1\nif n > 9: live['0.weight'].mul_(0.9)",
        refused=("n",),
    ),
    Loop(
        "foreach",
        setup="params = list(model.parameters())\nk = 1.0",
        after="k = k * 0.99\nif step.number > 5:\n    with torch.no_grad(): torch._foreach_mul_(params, k)",
        refused=("k",),
    ),
    Loop(
        "model_apply",
        setup="p = 1.0\ndef shrink(m):\n    if isinstance(m, nn.Linear): m.weight.data.mul_(p)",
        after="p = p * 0.99\nif step.number > 5: model.apply(shrink)",
        refused=("p",),
    ),
    Loop(
        "model_apply_lambda",
        setup="p = 1.0",
        after="p = p * 0.99\n"
        "if step.number > 5: model.apply(lambda m: m.weight.data.mul_(p) if isinstance(m, nn.Linear) else m)",
        refused=("p",),
    ),
    Loop(
        "tree_map",
        setup="from torch.utils._pytree import tree_map\nk = 1.0",
        after="k = k * 0.99\nif step.number > 5: tree_map(lambda p: p.data.mul_(k), list(model.parameters()))",
        refused=("k",),
    ),
    Loop(
        "executor",
        setup="from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\n"
        "n = 0\n"
        "def setlr(lr): optimizer.param_groups[0]['lr'] = lr",
        after="n += 1\npool.submit(setlr, 0.1 if n < 9 else 0.02).result()",
        refused=("n",),
    ),
    Loop(
        "executor_args",
        setup="from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\n"
        "n = 0\n"
        "def setlr(o, lr): o.param_groups[0]['lr'] = lr",
        after="n += 1\npool.submit(setlr, optimizer, 0.1 if n < 9 else 0.02).result()",
        refused=("n",),
    ),
    Loop(
        "class_forward",
        setup="class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.l = nn.Linear(4, 2)\n"
        "    def forward(self, x): return self.l(x)\n"
        "    def late(self, x): return self.l(x) * 0.5\n"
        "model = Net()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        after="if step.number == 5: Net.forward = Net.late",
        refused=("Net.forward",),
    ),
    Loop(
        "torch_forward",
        after="if step.number == 5: nn.Tanh.forward = lambda self, x: x * 0.5",
        refused=("nn.Tanh.forward",),
    ),
    Loop(
        "criterion_attr",
        setup="loss_fn = nn.CrossEntropyLoss()",
        after="if step.number == 5: loss_fn.label_smoothing = 0.1",
        refused=("loss_fn.label_smoothing",),
    ),
    Loop(
        "criterion_weight",
        setup="loss_fn = nn.CrossEntropyLoss(weight=torch.ones(2))",
        after="if step.number == 5: loss_fn.weight[0] = 0.5",
        refused=("loss_fn.weight",),
    ),
    Loop(
        "sqlite_memory",
        setup="import sqlite3\ndb = sqlite3.connect(':memory:')\ndb.execute('create table t (loss real)')",
        after="db.execute('insert into t values (?)', (step.loss,))\n"
        "n = db.execute('select count(*) from t').fetchone()[0]\n"
        "if n > 9: halve()",
        refused=("db",),
    ),
    Loop(
        "contextvar",
        setup="import contextvars\nn = contextvars.ContextVar('n', default=0)",
        after="n.set(n.get() + 1)\nif n.get() > 9: halve()",
        refused=("n",),
    ),
    Loop(
        "mp_value",
        setup="import multiprocessing as mp\nv = mp.Value('i', 0)",
        after="v.value += 1\nif v.value > 9: halve()",
        refused=("v.value",),
    ),
    Loop(
        "vars_dict",
        setup="box = argparse.Namespace(n=0)",
        after="vars(box)['n'] += 1\nif box.n > 9: halve()",
        refused=("box",),
    ),
    Loop(
        "no_grad_function",
        setup="box = {'n': 0}\n@torch.no_grad()\ndef tick():\n    box['n'] += 1\n    if box['n'] > 9: halve()",
        after="tick()",
        refused=("box",),
    ),
    Loop(
        "no_grad_late",
        setup="ema = None\n"
        "@torch.no_grad()\n"
        "def tick(k):\n"
        "    global ema\n"
        "    if k == 6: ema = copy.deepcopy(model)\n"
        "    if k > 6:\n"
        "        for e, p in zip(ema.parameters(), model.parameters()): e.lerp_(p, 0.1)\n"
        "    if k == 14:\n"
        "        for e, p in zip(ema.parameters(), model.parameters()): p.copy_(e)",
        after="tick(step.number)",
        refused=("ema",),
    ),
    Loop(
        "contextmanager_gen",
        setup="import contextlib\n"
        "n = 0\n"
        "@contextlib.contextmanager\n"
        "def counted():\n"
        "    global n\n"
        "    n += 1\n"
        "    yield n\n"
        "    if n > 9: halve()",
        after="with counted(): pass",
        refused=("n",),
    ),
    Loop(
        "exit_method",
        setup="class Cm:\n"
        "    n = 0\n"
        "    def __enter__(self): self.n += 1\n"
        "    def __exit__(self, *a):\n"
        "        if self.n > 9: halve()\n"
        "cm = Cm()",
        after="with cm: pass",
        refused=("cm.n",),
    ),
    Loop(
        "enter_value",
        setup="class Cm:\n"
        "    n = 0\n"
        "    def __enter__(self):\n"
        "        self.n += 1\n"
        "        return 0.1 if self.n < 9 else 0.01\n"
        "    def __exit__(self, *a): pass\n"
        "cm = Cm()",
        after="with cm as lr: optimizer.param_groups[0]['lr'] = lr",
        refused=("cm.n",),
    ),
    Loop(
        "dunder_bool",
        setup="class T:\n"
        "    def __init__(self): self.n = 0\n"
        "class Stop:\n"
        "    def __init__(self): self.t = T()\n"
        "    def note(self): self.t.n += 1\n"
        "    def __bool__(self): return self.t.n > 9\n"
        "stop = Stop()",
        after="stop.note()\nif stop: halve()",
        refused=("stop.t.n",),
    ),
    Loop(
        "dunder_float",
        setup="class T:\n"
        "    def __init__(self): self.n = 0\n"
        "class S:\n"
        "    def __init__(self): self.t = T()\n"
        "    def note(self): self.t.n += 1\n"
        "    def __float__(self): return 0.1 if self.t.n < 9 else 0.01\n"
        "s = S()",
        after="s.note()\noptimizer.param_groups[0]['lr'] = float(s)",
        refused=("s.t.n",),
    ),
    Loop(
        "dunder_getitem",
        setup="class S:\n"
        "    def __init__(self): self.n = 0\n"
        "    def __getitem__(self, k):\n"
        "        self.n += 1\n"
        "        return 0.1 if self.n < 9 else 0.01\n"
        "s = S()",
        after="optimizer.param_groups[0]['lr'] = s[step.number]",
        refused=("s.n",),
    ),
    Loop(
        "dunder_rmul",
        setup="class W:\n"
        "    def __init__(self): self.v = [1.0]\n"
        "    def __rmul__(self, o):\n"
        "        self.v[0] *= 0.99\n"
        "        return o * self.v[0]\n"
        "w = W()",
        after="optimizer.param_groups[0]['lr'] = 0.1 * w",
        refused=("w.v",),
    ),
    Loop(
        "for_else",
        setup="wait = 0",
        after="wait += 1\nfor k in (1,):\n    if wait < 9: break\nelse:\n    halve()",
        refused=("wait",),
    ),
    Loop(
        "cached_property",
        setup="class C:\n"
        "    base = 1.0\n"
        "    @functools.cached_property\n"
        "    def scale(self): return self.base * (0.5 + step.number)\n"
        "c = C()",
        batch="if step.number > 5: x = x * c.scale",
        refused=("c.scale",),
    ),
    Loop(
        "file_joined",
        setup="folder = '.'",
        after="p = os.path.join(folder, 'lr.txt')\n"
        "if step.number > 5: optimizer.param_groups[0]['lr'] = float(open(p).read()) * 0.9\n"
        "with open(p, 'w') as f: f.write(str(optimizer.param_groups[0]['lr']))",
        refused=("p",),
    ),
    Loop(
        "file_path_div",
        setup="import pathlib\nfolder = pathlib.Path('.')",
        after="if (folder / 'n.txt').exists(): n = int((folder / 'n.txt').read_text())\n"
        "else: n = 0\n"
        "(folder / 'n.txt').write_text(str(n + 1))\n"
        "if n > 9: halve()",
        refused=("folder / 'n.txt'",),
    ),
    Loop(
        "file_json_class",
        setup="import json\n"
        "class Store:\n"
        "    def __init__(self, d): self.d = d\n"
        "    def get(self):\n"
        "        try:\n"
        "            with open(f'{self.d}/s.json') as f: return json.load(f)\n"
        "        except OSError: return {'n': 0}\n"
        "    def put(self, v):\n"
        "        with open(f'{self.d}/s.json', 'w') as f: json.dump(v, f)\n"
        "store = Store('.')",
        after="s = store.get()\ns['n'] += 1\nstore.put(s)\nif s['n'] > 9: halve()",
        refused=("f'{self.d}/s.json'",),
    ),
    Loop(
        "operator_setitem",
        setup="import operator\nn = 0",
        after="n += 1\noperator.setitem(optimizer.param_groups[0], 'lr', 0.1 if n < 9 else 0.01)",
        refused=("n",),
    ),
    Loop(
        "dict_update_unbound",
        setup="n = 0",
        after="n += 1\ndict.update(optimizer.param_groups[0], lr=0.1 if n < 9 else 0.01)",
        refused=("n",),
    ),
    Loop(
        "setattr_dynamic",
        setup="box = argparse.Namespace(n=0)\nname = 'n'",
        after="setattr(box, name, getattr(box, name) + 1)\nif box.n > 9: halve()",
        refused=("box",),
    ),
    Loop(
        "grad_norm_clip",
        setup="ema_norm = None\n"
        "def clip(p):\n"
        "    global ema_norm\n"
        "    n = float(p.grad.norm())\n"
        "    ema_norm = n if ema_norm is None else 0.9 * ema_norm + 0.1 * n\n"
        "    if n > ema_norm * 0.5: p.grad.mul_(ema_norm / n * 0.5)\n"
        "model[0].weight.register_post_accumulate_grad_hook(clip)",
        refused=("ema_norm",),
    ),
    Loop(
        "static_method",
        setup="class S:\n"
        "    seen = 0\n"
        "    @classmethod\n"
        "    def tick(cls):\n"
        "        cls.seen += 1\n"
        "        return cls.seen\n"
        "    @staticmethod\n"
        "    def over(): return S.seen > 9",
        after="S.tick()\nif S.over(): halve()",
        refused=("S.seen",),
    ),
    Loop(
        "sample_weights",
        setup="class D:\n"
        "    weights = {i: 1.0 for i in range(32)}\n"
        "    def __len__(self): return 32\n"
        "    def __getitem__(self, i): return torch.full((4,), self.weights[i]), torch.tensor(i % 2)\n"
        "data = D()",
        after="if step.number > 5:\n    for i in range(32): data.weights[i] *= 0.95",
        refused=("data.weights",),
    ),
    Loop(
        "dict_by_step_summed",
        setup="scales = {}",
        before="scales[step.number] = 0.1 * step.number\noptimizer.param_groups[0]['lr'] = sum(scales.values())",
        refused=("scales",),
    ),
    Loop(
        "dict_by_step_counted",
        setup="scales = {}",
        before="if step.number not in scales: scales[step.number] = 1\n"
        "optimizer.param_groups[0]['lr'] = 0.1 / len(scales)",
        refused=("scales",),
    ),
    Loop(
        "dict_by_step_looked_back",
        setup="scales = {}",
        before="scales[step.number] = 0.1 * step.number\n"
        "optimizer.param_groups[0]['lr'] = scales.get(step.number - 2, 0.1)",
        refused=("scales",),
    ),
    Loop(
        "dict_by_step_by_another_key",
        setup="scales, kept = {}, everstep.state(k=1)",
        given="state=kept",
        before="scales[step.number] = 0.1 * step.number\noptimizer.param_groups[0]['lr'] = scales.get(kept.k, 0.1)",
        refused=("scales",),
    ),
    Loop(
        "dict_by_step_later",
        setup="scales = {}",
        before="scales[step.number] = 0.1 * step.number\n",
        after="if step.number > 100 and max(scales.values()) > 5: halve()",
        refused=("scales",),
    ),
    Loop(
        "table_by_step",
        setup="table = torch.zeros(99)",
        before="table[step.number] = 0.1 * step.number\noptimizer.param_groups[0]['lr'] = float(table.mean())",
        refused=("table",),
    ),
    Loop(
        "dict_by_step_of_an_object",
        setup="class S:\n"
        "    def __init__(self): self.d = {}\n"
        "    def put(self, n): self.d.setdefault(n, 0.1 * n)\n"
        "    def total(self): return sum(v for k, v in self.d.items())\n"
        "s = S()",
        before="s.put(step.number)\noptimizer.param_groups[0]['lr'] = s.total()",
        refused=("s.d",),
    ),
    Loop(
        "ring_of_losses",
        setup="ring = [0.0] * 10",
        after="ring[step.number % 10] = step.loss\nif step.number > 100 and sum(ring) > 5: halve()",
        refused=("ring",),
    ),
    Loop(
        "ring_of_an_object",
        setup="class Kept:\n"
        "    def __init__(self): self.ring = torch.zeros(4)\n"
        "    def put(self, k, value): self.ring[k % 4] = value\n"
        "kept = Kept()",
        after="kept.put(step.number, step.loss)\noptimizer.param_groups[0]['lr'] = 0.1 / (1 + float(kept.ring.mean()))",
        refused=("kept.ring",),
    ),
    Loop(
        "two_keys_of_a_dict",
        setup="kept = {'loss': 0.0, 'scale': 1.0}",
        after="kept['scale'] = kept['scale'] * 0.9\nkept['loss'] = step.loss\n"
        "optimizer.param_groups[0]['lr'] = 0.1 * kept['scale']",
        refused=("kept",),
    ),
    Loop(
        "losses_by_step",
        setup="losses = {}",
        after="losses[step.number] = step.loss\noptimizer.param_groups[0]['lr'] = 0.1 / (1 + max(losses.values()))",
        refused=("losses",),
    ),
    Loop(
        "zero_rounds",
        setup="ring = [0.0, 0.0]",
        after="for _ in range(0):\n"
        "    ring[0] = step.loss\n"
        "ring[1] = step.loss\n"
        "optimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(ring)\n"
        "if step.number == 4: ring[:] = [1.0, 2.0]",
        refused=("ring",),
    ),
    Loop(
        "constant_if",
        setup="ring = [0.0, 0.0]",
        after="if False:\n"
        "    ring[0] = 1.0\n"
        "ring[1] = step.loss\n"
        "optimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(ring)\n"
        "if step.number == 4: ring[:] = [1.0, 2.0]",
        refused=("ring",),
    ),
    Loop(
        "while_zero",
        setup="ring = [0.0, 0.0]",
        after="while False:\n"
        "    ring[0] = step.loss\n"
        "ring[1] = 0.5\n"
        "optimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(ring)\n"
        "if step.number == 4: ring[0] = 3.0",
        refused=("ring",),
    ),
    Loop(
        "try_part",
        setup="ring = [0.0, 0.0]",
        after="try:\n"
        "    float('x')\n"
        "    ring[0] = 1.0\n"
        "except ValueError:\n"
        "    pass\n"
        "ring[1] = 0.5\n"
        "optimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(ring)\n"
        "if step.number == 4: ring[0] = 3.0",
        refused=("ring",),
    ),
    Loop(
        "match_none",
        setup="ring = [0.0, 0.0]",
        after="match 3:\n"
        "    case 4:\n"
        "        ring[0] = 1.0\n"
        "ring[1] = 0.5\n"
        "optimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(ring)\n"
        "if step.number == 4: ring[0] = 3.0",
        refused=("ring",),
    ),
    Loop(
        "grows",
        setup="hist = {'n': 0}",
        after="hist['n'] = 1\n"
        "hist[step.number] = step.loss\n"
        "optimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(hist.values())",
        refused=("hist",),
    ),
    Loop(
        "grows_empty",
        setup="hist = {}",
        after="hist['n'] = 1\n"
        "hist[step.number] = step.loss\n"
        "optimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(hist.values())",
        refused=("hist",),
    ),
    Loop(
        "name_zero",
        setup="best = 1.0",
        after="for _ in range(0): best = step.loss\n"
        "optimizer.param_groups[0]['lr'] = 0.1 * best\n"
        "if step.number == 4: best = 0.5",
        refused=("best",),
    ),
    Loop(
        "name_try",
        setup="best = 1.0",
        after="try:\n"
        "    best = float('x')\n"
        "except ValueError:\n"
        "    pass\n"
        "optimizer.param_groups[0]['lr'] = 0.1 * best\n"
        "if step.number == 4: best = 0.5",
        refused=("best",),
    ),
    Loop(
        "name_match",
        setup="best = 1.0",
        after="match 3:\n"
        "    case 4:\n"
        "        best = 2.0\n"
        "optimizer.param_groups[0]['lr'] = 0.1 * best\n"
        "if step.number == 4: best = 0.5",
        refused=("best",),
    ),
    Loop(
        "slice_whole_zero",
        setup="ring = [0.0, 0.0]",
        after="for _ in range(0): ring[:] = [step.loss, 0]\n"
        "optimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(ring)\n"
        "if step.number == 4: ring[0] = 3.0",
        refused=("ring",),
    ),
    Loop(
        "grows_after",
        setup="hist = {}",
        after="hist['m'] = 1\noptimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(hist.values())\nhist['n'] = step.loss",
        refused=("hist",),
    ),
    Loop(
        "appended_after",
        setup="hist = [0.0]",
        after="hist[0] = 1\noptimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(hist)\nhist.append(step.loss)",
        refused=("hist",),
    ),
    Loop(
        "updated_after",
        setup="hist = {'a': 0.0}",
        after="hist['a'] = 1\n"
        "optimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(hist.values())\n"
        "hist.update({str(step.number): step.loss})",
        refused=("hist",),
    ),
    Loop(
        "setdefault_const",
        setup="hist = {}",
        after="hist.setdefault('first', step.loss)\noptimizer.param_groups[0]['lr'] = 0.1 * hist['first']",
        refused=("hist",),
    ),
    Loop(
        "gone",
        setup="best = 1.0\ndef f(k, loss):\n    global best\n    if k % 2: return\n    best = loss",
        after="f(step.number, step.loss)\noptimizer.param_groups[0]['lr'] = 0.1 * best",
        refused=("best",),
    ),
    Loop(
        "gone_const",
        setup="best = 1.0\ndef f(k, loss):\n    global best\n    if True: return\n    best = loss",
        after="f(step.number, step.loss)\n"
        "optimizer.param_groups[0]['lr'] = 0.1 * best\n"
        "if step.number == 4: best = 0.5",
        refused=("best",),
    ),
    Loop(
        "skip",
        setup="best = 1.0",
        after="for k in range(3):\n"
        "    if step.number % 2: continue\n"
        "    best = step.loss\n"
        "optimizer.param_groups[0]['lr'] = 0.1 * best",
        refused=("best",),
    ),
    Loop(
        "chosen",
        setup="best = 1.0\ndef f(l):\n    global best\n    best = l\ndef g(l): pass\nacts = {0: f, 1: g}",
        after="acts[step.number % 2](step.loss)\noptimizer.param_groups[0]['lr'] = 0.1 * best",
        refused=("best",),
    ),
    Loop(
        "suppressed",
        setup="import contextlib\nbest = 1.0",
        after="with contextlib.suppress(ZeroDivisionError):\n"
        "    best = 1 / (step.number % 2)\n"
        "optimizer.param_groups[0]['lr'] = 0.1 * best",
        refused=("best",),
    ),
    Loop(
        "comp_empty",
        setup="ring = [0.0]",
        after="[ring.clear() for _ in range(step.number % 2)]\n"
        "optimizer.param_groups[0]['lr'] = 0.1 + 0.01 * sum(ring)\n"
        "ring.append(step.loss)",
        refused=("ring",),
    ),
    Loop(
        "view_torch",
        setup="buf = torch.zeros(2, 4)\nhead = buf[0]",
        batch="x = x - buf.sum(0)\nhead.copy_(x.detach().mean(0))",
        refused=("buf",),
    ),
    Loop(
        "numpy",
        setup="counts = np.zeros(2)",
        batch="np.add.at(counts, y.numpy(), 1)\nw = torch.from_numpy(1 / (1 + counts)).float()\nx = x * w[y][:, None]",
        refused=("counts",),
    ),
    Loop(
        "numpy_view",
        setup="buf = np.zeros((2, 4), dtype=np.float32)\nhead = buf[0]",
        batch="x = x - torch.from_numpy(buf).sum(0)\nhead[...] = x.mean(0).numpy()",
        refused=("buf",),
    ),
    Loop(
        "leader_weighs", before="scale = 1.0 if run.is_main else 0.5", batch="x = x * scale", refused=("run.is_main",)
    ),
    Loop(
        "leader_trains",
        after="lead = run.is_main\nif lead and step.number % 2:\n    optimizer.param_groups[0]['lr'] *= 0.5",
        refused=("run.is_main",),
    ),
    Loop(
        "leader_ends",
        setup="def good():\n    return run.is_main and step.loss < 1e-3",
        after="if good():\n    break",
        refused=("run.is_main",),
    ),
    Loop("leader_evaluates", after="if run.is_main:\n    run.evaluate(lambda b: {}, data)", refused=("run.is_main",)),
]
