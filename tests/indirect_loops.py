"""Loops whose state reaches the training on ways that are easily overlooked, and loops that look alike and do no harm.

The training depends on what is carried by a shortcut, an exception, a table of functions, an operator, a decorator, a
hook, an optimizer of the user's own, a function that is exchanged.
"""

from __future__ import annotations

from rehearsed_scripts import Loop

BAD = [
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
]

CLEAN = [
    Loop(
        "own_sgd",
        setup="class Own(torch.optim.SGD):\n"
        "    @torch.no_grad()\n"
        "    def step(self, closure=None):\n"
        "        for g in self.param_groups:\n"
        "            for p in g['params']:\n"
        "                if p.grad is not None: p -= g['lr'] * p.grad\n"
        "optimizer = Own(model.parameters(), lr=0.1)",
    ),
    Loop(
        "own_lookahead",
        setup="class Own(torch.optim.SGD):\n"
        "    def __init__(self, params, lr):\n"
        "        super().__init__(params, lr=lr)\n"
        "        self.calls, self.slow = 0, [p.detach().clone() for p in self.param_groups[0]['params']]\n"
        "    @torch.no_grad()\n"
        "    def step(self, closure=None):\n"
        "        super().step()\n"
        "        self.calls += 1\n"
        "        if self.calls % 5 == 0:\n"
        "            for fast, slow in zip(self.param_groups[0]['params'], self.slow):\n"
        "                fast.copy_(slow.lerp_(fast, 0.5))\n"
        "optimizer = Own(model.parameters(), 0.1)",
    ),
    Loop(
        "own_adam_state",
        setup="class Own(torch.optim.Optimizer):\n"
        "    def __init__(self, params, lr): super().__init__(params, {'lr': lr})\n"
        "    @torch.no_grad()\n"
        "    def step(self, closure=None):\n"
        "        for g in self.param_groups:\n"
        "            for p in g['params']:\n"
        "                if p.grad is None: continue\n"
        "                state = self.state[p]\n"
        "                if not state:\n"
        "                    state['step'] = 0\n"
        "                    state['m'] = torch.zeros_like(p)\n"
        "                state['step'] += 1\n"
        "                state['m'].mul_(0.9).add_(p.grad, alpha=0.1)\n"
        "                p.add_(state['m'], alpha=-g['lr'] / (1 - 0.9 ** state['step']))\n"
        "optimizer = Own(model.parameters(), 0.1)",
    ),
    Loop(
        "tqdm_like",
        setup="class Bar:\n"
        "    def __init__(self, it): self.it, self.n, self.t = it, 0, time.time()\n"
        "    def update(self, n=1):\n"
        "        self.n += n\n"
        "        if time.time() - self.t > 0.1:\n"
        "            self.t = time.time()\n"
        "            print(f'{self.n} {self}')\n"
        "    def set_postfix(self, **k): self.post = k\n"
        "    def __str__(self): return str(self.n)\n"
        "    def __len__(self): return self.n\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *a): print(self)\n"
        "bar = Bar(range(9))",
        after="bar.update()\nbar.set_postfix(loss=step.loss, lr=optimizer.param_groups[0]['lr'])",
    ),
    Loop(
        "with_timer",
        setup="class Timer:\n"
        "    total = 0.0\n"
        "    def __enter__(self):\n"
        "        self.t0 = time.perf_counter()\n"
        "        return self\n"
        "    def __exit__(self, *a):\n"
        "        self.total += time.perf_counter() - self.t0\n"
        "        if self.total > 100: print('slow')\n"
        "timer = Timer()",
        batch="with timer: z = model(x)",
        after="print(timer.total)",
    ),
    Loop(
        "contextmanager_timer",
        setup="import contextlib\n"
        "times = collections.defaultdict(float)\n"
        "@contextlib.contextmanager\n"
        "def timed(name):\n"
        "    t0 = time.time()\n"
        "    try:\n"
        "        yield\n"
        "    finally:\n"
        "        times[name] += time.time() - t0",
        batch="with timed('forward'): z = model(x)",
        after="if step.number % 5 == 0: print(dict(times))",
    ),
    Loop(
        "deco_timer",
        setup="calls = collections.Counter()\n"
        "def timed(f):\n"
        "    @functools.wraps(f)\n"
        "    def inner(*a, **k):\n"
        "        t0 = time.time()\n"
        "        out = f(*a, **k)\n"
        "        calls[f.__name__] += 1\n"
        "        spent.append(time.time() - t0)\n"
        "        return out\n"
        "    return inner\n"
        "spent = []\n"
        "@timed\n"
        "def loss_fn(a, b): return nn.functional.cross_entropy(a, b)",
        after="print(calls)",
    ),
    Loop(
        "try_log",
        setup="seen = []",
        after="try:\n"
        "    seen.append(step.loss)\n"
        "    print(seen[-5])\n"
        "except IndexError:\n"
        "    print('not yet')\n"
        "for g in optimizer.param_groups: g['lr'] = 0.1 / step.number",
    ),
    Loop(
        "nan_raise",
        setup="bad = 0\nclass Diverged(Exception): pass",
        after="if step.loss != step.loss: bad += 1\nif bad > 3: raise Diverged('nan')\nassert bad < 99, 'x'",
    ),
    Loop(
        "try_whole_body",
        setup="n = 0",
        after="try:\n"
        "    n += 1\n"
        "    if n % 5 == 0: print('n', n)\n"
        "except Exception as e:\n"
        "    print(e)\n"
        "finally:\n"
        "    print('f')",
    ),
    Loop(
        "short_circuit_log",
        setup="n = 0\nverbose = True",
        after="n += 1\nverbose and n % 5 == 0 and print(n)\nprint(n) if n % 7 == 0 else None",
    ),
    Loop(
        "writer_history",
        setup="class W:\n"
        "    def __init__(self): self.rows = []\n"
        "    def __getitem__(self, k): return self.rows[k]\n"
        "    def __iadd__(self, row):\n"
        "        self.rows.append(row)\n"
        "        return self\n"
        "    def __bool__(self): return len(self.rows) > 0\n"
        "w = W()",
        after="w += (step.number, step.loss)\nif w: print(w[-1])",
    ),
    Loop(
        "best_dataclass",
        setup="@dataclasses.dataclass\n"
        "class Best:\n"
        "    loss: float = 1e9\n"
        "    step: int = 0\n"
        "    def update(self, loss, k):\n"
        "        if loss < self.loss:\n"
        "            self.loss, self.step = loss, k\n"
        "            return True\n"
        "        return False\n"
        "best = Best()",
        after="if best.update(step.loss, step.number): torch.save(model.state_dict(), os.devnull)",
    ),
    Loop(
        "best_weights_kept",
        setup="best = {'loss': 1e9, 'text': ''}",
        after="if step.loss < best['loss']: best.update(loss=step.loss, text=f'{step.number}')",
    ),
    Loop(
        "sqlite_log",
        setup="import sqlite3\ndb = sqlite3.connect(':memory:')\ndb.execute('create table t (loss real)')",
        after="db.execute('insert into t values (?)', (step.loss,))\n"
        "db.commit()\n"
        "print(db.execute('select count(*) from t').fetchone())",
    ),
    Loop(
        "sqlite_data",
        setup="import sqlite3\n"
        "db = sqlite3.connect(':memory:', check_same_thread=False)\n"
        "db.execute('create table t (i int, v real)')\n"
        "db.executemany('insert into t values (?, ?)', [(i, i * 0.1) for i in range(32)])\n"
        "class D:\n"
        "    def __len__(self): return 32\n"
        "    def __getitem__(self, i):\n"
        "        v = db.execute('select v from t where i = ?', (i,)).fetchone()[0]\n"
        "        return torch.full((4,), v), torch.tensor(i % 2)\n"
        "data = D()",
    ),
    Loop(
        "dispatch_losses",
        setup="ce = nn.functional.cross_entropy\n"
        "losses = {'ce': lambda a, b: ce(a, b), 'half': lambda a, b: 0.5 * ce(a, b)}\n"
        "kind = 'ce'\n"
        "def loss_fn(a, b): return losses[kind](a, b)",
    ),
    Loop(
        "dispatch_callbacks",
        setup="class Cb:\n"
        "    n = 0\n"
        "    def on_step(self, k): self.n += 1\n"
        "    def on_end(self, k): print(self.n)\n"
        "cbs = [Cb(), Cb()]\n"
        "def fire(name, *a):\n"
        "    for cb in cbs: getattr(cb, name)(*a)",
        after="fire('on_step', step.number)\nfire('on_end', step.number)",
    ),
    Loop(
        "config_dc",
        setup="@dataclasses.dataclass(frozen=True)\n"
        "class Cfg:\n"
        "    lr: float = 0.1\n"
        "    warm: int = 5\n"
        "    @property\n"
        "    def base(self): return self.lr * 2\n"
        "    @functools.cached_property\n"
        "    def table(self): return [0.1 * k for k in range(99)]\n"
        "cfg = Cfg()",
        after="for g in optimizer.param_groups: g['lr'] = cfg.base * min(1, step.number / cfg.warm) + cfg.table[0]",
    ),
    Loop(
        "namespace_setter",
        setup="class Sched:\n"
        "    def __init__(self, o): self.o = o\n"
        "    @property\n"
        "    def lr(self): return self.o.param_groups[0]['lr']\n"
        "    @lr.setter\n"
        "    def lr(self, v):\n"
        "        for g in self.o.param_groups: g['lr'] = v\n"
        "sched = Sched(optimizer)",
        after="sched.lr = 0.1 / (1 + step.number)",
    ),
    Loop(
        "super_base",
        setup="class Base(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.l = nn.Linear(4, 2)\n"
        "        self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        return self.l(x)\n"
        "class Net(Base):\n"
        "    def forward(self, x): return super().forward(x) * 2\n"
        "model = Net()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    Loop(
        "grl_scheduled",
        setup="class Rev(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x, a):\n"
        "        ctx.a = a\n"
        "        return x.view_as(x)\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): return g * ctx.a, None",
        batch="x = x * Rev.apply(model[0].bias, 0.1 * step.number).sum()",
    ),
    Loop(
        "grl_class_by_step",
        setup="class Rev(torch.autograd.Function):\n"
        "    alpha = 0.0\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): return x.view_as(x)\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): return g * Rev.alpha",
        before="Rev.alpha = step.number * 0.01",
        batch="x = x * Rev.apply(model[0].bias).sum()",
    ),
    Loop(
        "grad_norm_hook",
        setup="norms = collections.deque(maxlen=20)\n"
        "model[0].weight.register_post_accumulate_grad_hook(lambda p: norms.append(float(p.grad.norm())))\n"
        "model[0].weight.register_hook(lambda g: g.clamp(-1, 1))",
        after="if norms: print(sum(norms) / len(norms))",
    ),
    Loop(
        "grad_copies",
        setup="grads = {}\nmodel[0].weight.register_hook(lambda g: grads.__setitem__('w', g.detach().clone()))",
        after="print(grads['w'].norm())",
    ),
    Loop(
        "model_apply_stats",
        setup="stats = {}\ndef note(m): stats[type(m).__name__] = stats.get(type(m).__name__, 0) + 1",
        after="model.apply(note)\nprint(stats)",
    ),
    Loop(
        "executor_log",
        setup="from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\n"
        "rows = []\n"
        "def write(row): rows.append(row)",
        after="pool.submit(write, (step.number, step.loss)).result()",
    ),
    Loop(
        "append_file",
        after="with open(os.devnull, 'a') as f: f.write(f'{step.number}\\n')\nif os.path.exists('stop'): print('x')",
    ),
    Loop(
        "json_rewrite",
        setup="import json\nhist = []",
        after="hist.append(step.loss)\n"
        "path = os.path.join('.', 'h.json')\n"
        "with open(path, 'w') as f: json.dump(hist, f)",
    ),
    Loop(
        "reads_config",
        setup="import json\nopen('cfg.json', 'w').write('{\"lr\": 0.1}')",
        after="with open('cfg.json') as f: cfg = json.load(f)\noptimizer.param_groups[0]['lr'] = cfg['lr']",
    ),
    Loop(
        "memo_dict_fn",
        setup="memo = {}\n"
        "def table(n):\n"
        "    try:\n"
        "        return memo[n]\n"
        "    except KeyError:\n"
        "        memo[n] = torch.arange(n).float()\n"
        "        return memo[n]",
        batch="x = x + table(4)",
    ),
    Loop(
        "lazy_property",
        setup="class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.l = nn.Linear(4, 2)\n"
        "        self._mask = None\n"
        "    @property\n"
        "    def mask(self):\n"
        "        if self._mask is None: self._mask = torch.ones(4)\n"
        "        return self._mask\n"
        "    def forward(self, x): return self.l(x * self.mask)\n"
        "model = Net()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    Loop(
        "define_in_loop",
        after="def show(v): print('v', v)\nshow(step.loss)\nfmt = lambda v: f'{v:.3f}'\nprint(fmt(step.loss))",
    ),
    Loop(
        "closure_loss",
        before="w = 0.5 + 0.1 * step.number\ndef scaled(a, b): return w * nn.functional.cross_entropy(a, b)",
        batch="z = scaled(model(x), y)\nx = x * 1",
    ),
    Loop(
        "ema_print",
        setup="class Smooth:\n"
        "    v = None\n"
        "    def __add__(self, o):\n"
        "        self.v = o if self.v is None else 0.9 * self.v + 0.1 * o\n"
        "        return self\n"
        "    def __float__(self): return self.v\n"
        "sm = Smooth()",
        after="sm = sm + step.loss\nprint(float(sm))",
    ),
    Loop(
        "criterion_module",
        setup="loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)\nn = 0",
        after="n += 1\nprint(loss_fn.label_smoothing, n)",
    ),
    Loop(
        "clip_by_value",
        after="with torch.no_grad():\n    for p in model.parameters(): p.clamp_(-3, 3)",
    ),
    Loop(
        "ratio_log",
        setup="hist = collections.defaultdict(list)\nprev = [p.detach().norm() for p in model.parameters()]",
        after="for k, p in enumerate(model.parameters()):\n"
        "    hist[k].append(float(p.norm() / prev[k]))\n"
        "print(max(v[-1] for v in hist.values()))",
    ),
    Loop(
        "rich_progress",
        setup="class Task:\n"
        "    def __init__(self): self.completed = 0\n"
        "class Progress:\n"
        "    def __init__(self): self.tasks = {}\n"
        "    def add_task(self, n):\n"
        "        self.tasks[n] = Task()\n"
        "        return n\n"
        "    def advance(self, t, by=1): self.tasks[t].completed += by\n"
        "    def __rich__(self): return ', '.join(f'{k}:{t.completed}' for k, t in self.tasks.items())\n"
        "progress = Progress()\n"
        "t = progress.add_task('train')",
        after="progress.advance(t)\nprint(progress.__rich__())",
    ),
    Loop(
        "eta_cond",
        setup="t0, done = time.time(), 0",
        after="done += 1\n"
        "rate = done / max(1e-9, time.time() - t0)\n"
        "print(f'{rate:.1f}') if done % 3 == 0 or rate < 1 else None",
    ),
    Loop(
        "match_log",
        setup="n = 0",
        after="n += 1\nmatch n % 3:\n    case 0: print('a')\n    case _: pass",
    ),
    Loop(
        "augment_ops",
        setup="class Jitter:\n"
        "    def __init__(self, s): self.s = s\n"
        "    def __call__(self, x): return x + self.s * torch.randn(4)\n"
        "class D:\n"
        "    def __init__(self): self.ops = {'a': Jitter(0.1), 'b': Jitter(0.2)}\n"
        "    def __len__(self): return 32\n"
        "    def __getitem__(self, i):\n"
        "        op = random.choice(list(self.ops))\n"
        "        return self.ops[op](torch.ones(4)), torch.tensor(i % 2)\n"
        "data = D()",
    ),
]
