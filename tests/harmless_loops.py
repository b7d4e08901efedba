"""Loops that look like those of `indirect_loops`, and do no harm."""

from __future__ import annotations

from rehearsed_scripts import Loop

CLEAN = [
    Loop(
        "items_set_in_a_counted_loop",
        setup="w = [1.0, 1.0]",
        before="for k in range(2):\n    w[k] = 1 / (step.number + k)",
        batch="x = x * w[0] + w[1]",
    ),
    Loop(
        "hook_that_is_a_lambda",
        setup="seen = {}\nmodel[0].register_forward_hook(lambda m, i, o: seen.update(shape=o.shape))",
    ),
    Loop(
        "hooks_that_are_lambdas",
        setup="acts = {}\n"
        "model[0].register_forward_hook(lambda m, i, o: acts.__setitem__('a', o))\n"
        "model[1].register_forward_hook(lambda m, i, o: o * 2)\n"
        "model[0].weight.register_hook(lambda g: g * 0.5)",
        batch="out = model(x)\nstep.backward(loss_fn(out, y) + acts['a'].square().mean())",
    ),
    Loop("name_set_before_it_is_read", setup="scale = 1", before="globals()['scale'] = 2", batch="x = x * scale"),
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
        "evaluation_defined_now_and_then",
        after="if step.number % 4 == 0:\n"
        "    def errors(batch):\n"
        "        return {'mse': ((model(batch[0]) - batch[1]) ** 2).sum()}\n"
        "    found = run.evaluate(errors, data)",
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
    Loop(
        "checkpoint_spread",
        setup="saved = {'name': 'mine'}",
        after="saved = {**saved, 'model': model.state_dict(), 'step': step.number}\n"
        "if step.number % 4 == 0: torch.save(saved, 'saved.pt')",
    ),
    Loop(
        "checkpoint_or",
        setup="saved = {'name': 'mine'}",
        after="saved = saved | {'model': model.state_dict(), 'step': step.number}\ntorch.save(saved, 'saved.pt')",
    ),
    Loop(
        "all_items_written",
        setup="now = [0.0, 0.0]",
        after="now[0] = step.number\nnow[1] = step.number + 1\noptimizer.param_groups[0]['lr'] = 0.1 / sum(now)",
    ),
    Loop(
        "memo_limited",
        setup="cache = {}\n"
        "def rate(n):\n"
        "    if n in cache: return cache[n]\n"
        "    v = 0.1 / (1 + n)\n"
        "    if len(cache) < 100: cache[n] = v\n"
        "    return v",
        before="optimizer.param_groups[0]['lr'] = rate(step.number)",
        after="print(len(cache), sum(cache.values()))",
    ),
    Loop(
        "memo_tried",
        setup="cache = {}\n"
        "def rate(n):\n"
        "    try:\n"
        "        return cache[n]\n"
        "    except KeyError:\n"
        "        cache[n] = 0.1 / (1 + n)\n"
        "        return cache[n]",
        before="optimizer.param_groups[0]['lr'] = rate(step.number)",
    ),
    Loop(
        "memo_set_by_default",
        setup="cache = {}",
        before="optimizer.param_groups[0]['lr'] = cache.setdefault(step.number, 0.1 / step.number)",
    ),
    Loop(
        "memo_looked_up_by_get",
        setup="masks = {}",
        batch="n = x.shape[0]\nm = masks.get(n)\nif m is None: m = masks[n] = torch.arange(n) % 2\nx = x * m.sum()",
    ),
    Loop(
        "dict_reset",
        setup="parts = {}",
        batch="parts['ce'] = nn.functional.cross_entropy(model(x), y)\n"
        "parts['l2'] = 1e-4 * model[0].weight.square().sum()\n"
        "step.backward(sum(parts.values()))",
    ),
    Loop(
        "buf_each_lane",
        setup="feats = [None, None]",
        batch="feats[0] = x\nfeats[1] = x * 2\nx = feats[0] + feats[1]",
    ),
    Loop(
        "try_sets",
        setup="w = [0.0]",
        before="try:\n    w[0] = 0.1\nexcept ValueError:\n    w[0] = 0.2\noptimizer.param_groups[0]['lr'] = w[0]",
    ),
    Loop(
        "match_sets",
        setup="lr = 0.0",
        before="match step.number % 2:\n"
        "    case 0:\n"
        "        lr = 0.1\n"
        "    case _:\n"
        "        lr = 0.2\n"
        "optimizer.param_groups[0]['lr'] = lr",
    ),
    Loop(
        "if_sets",
        setup="w = {'a': 0}",
        before="if step.number > 3:\n"
        "    w['a'] = 1\n"
        "else:\n"
        "    w['a'] = 2\n"
        "optimizer.param_groups[0]['lr'] = 0.1 * w['a']",
    ),
    Loop(
        "return_sets",
        setup="lr = 0.0\ndef f(k):\n    global lr\n    if k % 2:\n        lr = 0.1\n        return\n    lr = 0.2",
        before="f(step.number)\noptimizer.param_groups[0]['lr'] = lr",
    ),
    Loop(
        "out_dict",
        setup="out = {}",
        batch="out['a'] = model(x)\nout['loss'] = loss_fn(out['a'], y)\nstep.backward(out['loss'])",
    ),
    Loop(
        "features_by_a_hook",
        setup="feats = {}\ndef hook(m, i, o): feats['h'] = o\nmodel[0].register_forward_hook(hook)",
        batch="model(x)\nstep.backward(1e-3 * feats['h'].square().mean())",
    ),
    Loop(
        "outputs_of_a_hook",
        setup="outs = []\nmodel[0].register_forward_hook(lambda m, i, o: outs.append(o))",
        batch="outs.clear()\nmodel(x)\nstep.backward(1e-3 * outs[0].square().mean())",
    ),
    Loop(
        "leader_alone",
        setup="import logging, tqdm\nlog, best, history = logging.getLogger(), 9.0, []\n"
        "def sample():\n"
        "    if not run.is_main:\n"
        "        return None\n"
        "    torch.manual_seed(0)\n"
        "    model.eval()\n"
        "    with torch.no_grad():\n"
        "        out = model(torch.randn(2, 4)).sum().item()\n"
        "    model.train()\n"
        "    return out\n",
        after="seen = sample()\n"
        "if run.is_main:\n"
        "    history.append(step.loss)\n"
        "    log.info('loss %s of %s', step.loss, seen)\n"
        "    if step.loss < best:\n"
        "        best = step.loss\n"
        "        torch.save({'model': model.state_dict(), 'opt': optimizer.state_dict()}, 'best.pt')\n"
        "if not run.is_main:\n"
        "    continue\n"
        "print(best, sum(history))",
    ),
]
