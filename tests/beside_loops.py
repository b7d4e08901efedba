"""Loops whose state lies beside their own code: in forward passes, hooks of an optimizer, collate functions and
transforms, functions that a scheduler holds, files and variables of the process; and some that look alike.
"""

from __future__ import annotations

from rehearsed_scripts import Loop

_NET = """
class Net(nn.Module):
    k = 0
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 2)
        self.calls, self.total, self.scale, self.aux, self.seen = 0, 0.0, 1.0, None, 0
        self.register_buffer('mean', torch.zeros(4))
        self.register_buffer('count', torch.zeros(()))
    def forward(self, x):
{}
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def _net(*lines: str) -> str:
    return _NET.format("\n".join(f"        {line}" for line in lines))


def _hook(*lines: str, kind: str = "pre", before: str = "scale = 1.0") -> str:
    said = "\n".join(f"    {line}" for line in lines)
    return f"{before}\ndef hook(opt, args, kwargs):\n{said}\noptimizer.register_step_{kind}_hook(hook)"


_AUGMENT = """
class Augment:
    def __init__(self): self.p, self.n = 0.1, 0
    def __call__(self, x): return x + self.p
class Folder(torch.utils.data.Dataset):
    def __init__(self, transform): self.transform = transform
    def __len__(self): return 32
    def __getitem__(self, i): return self.transform(torch.ones(4) * i), torch.tensor(i % 2)
"""
_COMPOSE = """
from torch.utils.data import Subset, ConcatDataset, StackDataset
augment = Augment()
class Library(torch.utils.data.TensorDataset):
    pass
"""

_READER = """
import io, sqlite3
class Reader(torch.utils.data.Dataset):
    def __init__(self):
        self.env = self.txn = self.cur = self.rows = None
        self.gen, self.rng, self.file = torch.Generator(), random.Random(0), io.BytesIO(b'everstep' * 8)
        self.first, self.n = self.rng.getstate(), 0
    def __len__(self): return 32
    def __getitem__(self, i):
        {}
        return {}, torch.tensor(i % 2)
data = Reader()
"""
_BLOCKS = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.aux = nn.Linear(4, 4), 0.0
    def forward(self, x):
        h = self.l(x)
        self.aux += h.square().mean()
        return h
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(12)), nn.Linear(4, 2)
    def forward(self, x):
        for block in self.blocks: x = block(x)
        return self.head(x)
    def reset(self):
        for block in self.blocks: block.aux = 0.0
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

BAD = [
    # ---- attributes that a forward pass changes
    Loop(
        "forward_counts",
        setup=_net(
            "if self.training: self.calls += 1",
            "h = self.l(x)",
            "return h if self.calls < 400 else nn.functional.dropout(h, 0.1)",
        ),
        refused=("model.calls",),
    ),
    Loop(
        "forward_average",
        setup=_net("self.total = 0.9 * self.total + 0.1 * float(x.mean())", "return self.l(x - self.total)"),
        refused=("model.total",),
    ),
    Loop(
        "forward_decides_late",
        setup=_net("self.calls += 1", "if self.calls == 9: self.scale = 0.5", "return self.l(x) * self.scale"),
        refused=("model.calls",),
    ),
    Loop(
        "forward_counts_on_the_class",
        setup=_net("self.k += 1", "return self.l(x) if self.k < 9 else self.l(x) * 0.5"),
        refused=("model.k",),
    ),
    Loop(
        "forward_of_a_part_counts",
        setup=_net("self.calls += 1", "return self.l(x) if self.calls < 9 else self.l(x) * 0.5")
        + "inner, model = model, nn.Sequential(nn.Tanh(), model)",
        refused=("inner.calls",),
    ),
    Loop(
        "forward_averages_in_a_buffer",
        setup=_net(
            "self.calls += 1", "self.mean += (x.mean(0) - self.mean) / self.calls", "return self.l(x - self.mean)"
        ),
        refused=("model.calls",),
    ),
    Loop(
        "method_counts_for_a_batch",
        setup=_net("return self.l(x)")
        + "def noised(self, x):\n    self.calls += 1\n    return x * 0.99 ** self.calls\nNet.noised = noised",
        batch="x = model.noised(x)",
        refused=("model.calls",),
    ),
    Loop(
        "state_of_the_last_batch",
        setup=_net("self.aux = torch.tanh(self.l(x) + (0 if self.aux is None else self.aux))", "return self.aux")
        + "def cut(self):\n    self.aux = self.aux.detach()\nNet.cut = cut",
        batch="x = x * 1",
        refused=("model.aux",),
    ),
    Loop(
        "rate_of_a_library_class",
        setup="class Fading(nn.Dropout):\n"
        "    def forward(self, x):\n"
        "        self.p *= 0.99\n"
        "        return super().forward(x)\n"
        "fading = Fading(0.5)\n"
        "model.append(fading)",
        refused=("fading.p",),
    ),
    # ---- hooks of the optimizer
    Loop(
        "hook_scales_gradients",
        setup=_hook("for g in opt.param_groups:", "    for p in g['params']:", "        p.grad.mul_(scale)"),
        after="scale *= 0.9",
        refused=("scale",),
    ),
    Loop(
        "hook_sets_the_rate",
        setup=_hook("for g in opt.param_groups: g['lr'] = scale"),
        after="if step.loss < 1: scale = scale / 2",
        refused=("scale",),
    ),
    Loop(
        "hook_clips",
        setup=_hook("torch.nn.utils.clip_grad_norm_(opt.param_groups[0]['params'], scale)"),
        after="scale = 0.9 * scale + 0.1 * step.loss",
        refused=("scale",),
    ),
    Loop(
        "hook_clips_the_model",
        setup=_hook("torch.nn.utils.clip_grad_norm_(model.parameters(), scale)"),
        after="scale = 0.9 * scale + 0.1 * step.loss",
        refused=("scale",),
    ),
    Loop(
        "hook_adds_noise_afterwards",
        setup=_hook(
            "with torch.no_grad():",
            "    for p in [p for g in opt.param_groups for p in g['params']]:",
            "        p.add_(torch.ones_like(p) * scale)",
            kind="post",
        ),
        after="scale *= 0.9",
        refused=("scale",),
    ),
    Loop(
        "hook_counts",
        setup=_hook(
            "global n", "n += 1", "if n > 9:", "    for p in model.parameters(): p.grad = p.grad / 2", before="n = 0"
        ),
        refused=("n",),
    ),
    Loop(
        "hook_assigns_a_gradient",
        setup=_hook("model[0].weight.grad = model[0].weight.grad * scale"),
        after="scale *= 0.9",
        refused=("scale",),
    ),
    Loop(
        "hook_of_an_object",
        setup="class Clip:\n"
        "    n = 0\n"
        "    def __call__(self, opt, args, kwargs):\n"
        "        self.n += 1\n"
        "        if self.n > 9: torch.nn.utils.clip_grad_value_(opt.param_groups[0]['params'], 0.1)\n"
        "clip = Clip()\n"
        "optimizer.register_step_pre_hook(clip)",
        refused=("clip.n",),
    ),
    Loop(
        "hook_of_all_optimizers",
        setup="from torch.optim.optimizer import register_optimizer_step_pre_hook\nscale = 1.0\n"
        "def hook(opt, args, kwargs):\n"
        "    for g in opt.param_groups:\n"
        "        for p in g['params']: p.grad.mul_(scale)\n"
        "registered = register_optimizer_step_pre_hook(hook)",
        after="scale *= 0.9",
        refused=("scale",),
    ),
    Loop(
        "hook_of_all_modules",
        setup="from torch.nn.modules.module import register_module_forward_hook\nn = 0\n"
        "def hook(module, args, out):\n"
        "    global n\n"
        "    n += 1\n"
        "    return out * 0.99 if n > 9 else out\n"
        "registered = register_module_forward_hook(hook)",
        refused=("n",),
    ),
    Loop(
        "data_of_a_parameter",
        setup="scale = 1.0",
        after="scale *= 0.98\nif step.number > 5: model[0].weight.data.mul_(scale)",
        refused=("scale",),
    ),
    # ---- collate functions and transforms
    Loop(
        "collate_is_a_method",
        setup="class Batches:\n"
        "    def __init__(self): self.n, self.scale = 0, 1.0\n"
        "    def make(self, samples):\n"
        "        self.n += 1\n"
        "        if self.n % 10 == 0: self.scale = 0.9 * self.scale\n"
        "        x, y = torch.utils.data.default_collate(samples)\n"
        "        return x * self.scale, y\n"
        "batches = Batches()",
        given="collate=batches.make",
        refused=("batches.n", "batches.scale"),
    ),
    Loop(
        "collate_is_partial",
        setup="box = argparse.Namespace(scale=1.0)\n"
        "def make(box, samples):\n"
        "    x, y = torch.utils.data.default_collate(samples)\n"
        "    return x * box.scale, y",
        given="collate=functools.partial(make, box)",
        after="box.scale *= 0.9",
        refused=("box.scale",),
    ),
    Loop(
        "transform_far_down",
        setup=_AUGMENT
        + _COMPOSE
        + "whole = ConcatDataset([Subset(Subset(data, range(32)), range(32))])\n"
        + "whole.datasets[0].dataset.transform = functools.partial(augment)\n"
        + "data = Subset(Subset(whole, range(32)), range(32))",
        after="augment.p += 0.1",
        refused=("augment.p",),
    ),
    Loop(
        "transform_in_lists_far_down",
        setup=_AUGMENT
        + _COMPOSE
        + "holder = torch.utils.data.StackDataset(data, data)\nholder.transform = [[nn.Identity(), [augment]]]\n"
        + "data = Subset(Subset(data, range(32)), range(32))\ndata.dataset.holder = holder",
        after="augment.p += 0.1",
        refused=("augment.p",),
    ),
    Loop(
        "transform_is_a_module",
        setup="class Noise(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.p = 0.1\n"
        "    def forward(self, x): return x + self.p\n"
        "noise = Noise()\n"
        "from torch.utils.data import Subset\n"
        "data = Subset(data, range(32))\n"
        "data.transform = nn.Sequential(nn.Identity(), noise)",
        after="noise.p += 0.1",
        refused=("noise.p",),
    ),
    Loop(
        "transform_of_many_samples",
        setup=_AUGMENT
        + "augment = Augment()\n"
        + "from torch.utils.data import Subset\n"
        + "data = Subset(data, range(32))\n"
        + "data.lists = [[[[k]] * 40] * 40 for k in range(40)]\n"
        + "data.transforms = [augment]",
        after="augment.p += 0.1",
        refused=("augment.p",),
    ),
    # ---- functions that library objects hold
    Loop(
        "lambda_of_a_scheduler_in_state",
        setup="factor = 1.0\nsched = lr_scheduler.LambdaLR(optimizer, lambda k: factor)",
        given="state={'sched': sched}",
        after="factor *= 0.9\nsched.step()",
        refused=("factor",),
    ),
    Loop(
        "lambda_in_a_sequence",
        setup="factor = 1.0\n"
        "sched = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer), "
        "lr_scheduler.LambdaLR(optimizer, lambda k: factor)], milestones=[3])",
        given="scheduler=sched",
        after="factor *= 0.9",
        refused=("factor",),
    ),
    Loop(
        "function_of_an_average",
        setup="decay = 0.9\nema = AveragedModel(model, avg_fn=lambda e, p, n: decay * e + (1 - decay) * p)",
        given="state={'ema': ema}",
        after="decay = 1 - (1 - decay) * 0.9\nema.update_parameters(model)",
        refused=("decay",),
    ),
    # ---- shuffles, files, variables of the process
    Loop(
        "order_shuffled_by_a_generator",
        setup="order = list(range(4))\nkept = everstep.state(rng=np.random.default_rng(0))",
        given="state=kept",
        after="kept.rng.shuffle(order)\noptimizer.param_groups[0]['lr'] = 0.1 / (1 + order[0])",
        refused=("order",),
    ),
    Loop(
        "written_by_safetensors",
        setup="from safetensors.torch import load_file, save_file",
        after="if step.number % 10 == 0:\n"
        "    save_file(model.state_dict(), 'best.safetensors')\n"
        "if step.loss > 9:\n"
        "    model.load_state_dict(load_file('best.safetensors'))",
        refused=("best.safetensors",),
    ),
    Loop(
        "copied_file",
        setup="import shutil",
        after="torch.save(model.state_dict(), 'last.pt')\n"
        "if step.loss < 1: shutil.copy('last.pt', 'best.pt')\n"
        "if step.loss > 9: model.load_state_dict(torch.load('best.pt'))",
        refused=("best.pt", "last.pt"),
    ),
    Loop(
        "variable_of_the_process",
        after="os.environ['RATE'] = str(float(os.getenv('RATE', '0.1')) * 0.9)\n"
        "optimizer.param_groups[0]['lr'] = float(os.getenv('RATE'))\n",
        refused=("os.environ",),
    ),
    # ---- samples and batches that count
    Loop(
        "samples_drawn_by_a_generator",
        setup=_READER.format("pass", "torch.rand(4, generator=self.gen)"),
        refused=("data.gen",),
    ),
    Loop(
        "samples_drawn_after_one_seed",
        setup=_READER.format("if i == 0: self.rng.seed(i)", "torch.ones(4) * self.rng.random()"),
        refused=("data.rng",),
    ),
    Loop(
        "samples_read_on",
        setup=_READER.format("pass", "torch.ones(4) * len(self.file.read(1))"),
        refused=("data.file",),
    ),
    Loop(
        "samples_read_on_from_here",
        setup=_READER.format("self.file.seek(i, 1)", "torch.ones(4) * len(self.file.read(1))"),
        refused=("data.file",),
    ),
    Loop(
        "samples_counted",
        setup=_READER.format("self.n = self.n + 1", "torch.ones(4) / self.n"),
        refused=("data.n",),
    ),
    Loop(
        "mask_that_grows",
        setup=_net(
            "self.scale = self.scale.to(x.device)", "self.scale = self.scale * 0.9", "return self.l(x * self.scale)"
        )
        + "model.scale = torch.ones(4)",
        refused=("model.scale",),
    ),
    Loop(
        "mask_in_another_form_later",
        setup=_net(
            "self.calls += 1", "if self.calls > 9: self.scale = self.scale.half()", "return self.l(x * self.scale)"
        )
        + "model.scale = torch.ones(4)",
        refused=("model.calls",),
    ),
    Loop(
        "loss_of_the_parts_that_is_kept",
        setup=_BLOCKS + "one = model.blocks[0]\nmodel.blocks = model.blocks[:1]",
        batch="out = model(x)\nstep.backward(loss_fn(out, y) + one.aux)\nif step.number > 3: one.aux = 0.0",
        refused=("one.aux",),
    ),
    Loop(
        "hook_that_ends_early",
        setup=_hook(
            "global n",
            "n += 1",
            "if n < 9: return",
            "for p in model.parameters(): p.grad = p.grad / 2",
            before="n = 0",
        ),
        refused=("n",),
    ),
]

CLEAN = [
    Loop("unused_count", setup=_net("self.calls += 1", "self.total = self.total + float(x.sum())", "return self.l(x)")),
    Loop(
        "count_that_is_printed",
        setup=_net("self.calls += 1", "if self.calls % 100 == 0: print(self.calls, self.total)", "return self.l(x)"),
    ),
    Loop(
        "count_from_which_more_is_counted",
        setup=_net("self.calls += 1", "self.seen = self.calls * len(x)", "return self.l(x)"),
        batch="print(model.seen)",
    ),
    Loop(
        "loss_beside_the_output",
        setup=_net("h = self.l(x)", "if self.training:", "    self.aux = h.square().mean()", "return h"),
        batch="y = y\nout = model(x)\nstep.backward(loss_fn(out, y) + 0.01 * model.aux)",
    ),
    Loop(
        "positions_that_grow",
        setup=_net(
            "if x.shape[1] > self.seen:",
            "    self.seen = x.shape[1]",
            "    self.table = torch.arange(self.seen)",
            "return self.l(x + self.table[: x.shape[1]])",
        ),
    ),
    Loop(
        "made_at_the_first_call",
        setup=_net("if self.aux is None:", "    self.aux = torch.ones(4)", "return self.l(x * self.aux)"),
    ),
    Loop(
        "average_in_buffers",
        setup=_net("self.count += 1", "self.mean.lerp_(x.mean(0), 0.1)", "return self.l(x - self.mean)"),
    ),
    Loop(
        "rate_that_the_loop_sets",
        setup=_net("return self.l(x) * self.scale"),
        after="model.scale = model.scale * 0.9",
    ),
    Loop(
        "rate_that_a_method_sets_after_the_batches",
        setup=_net("return self.l(x) * self.scale") + "def cool(self): self.scale *= 0.9\nNet.cool = cool",
        after="model.cool()",
    ),
    Loop(
        "count_of_an_evaluation",
        setup=_net("self.calls += 1", "return self.l(x)"),
        after="model.eval()\nmodel(torch.ones(1, 4))\nmodel.train()",
    ),
    Loop("hook_that_logs", setup=_hook("norms.append(float(model[0].weight.grad.norm()))", before="norms = []")),
    Loop(
        "hook_that_counts",
        setup=_hook(
            "global n", "n += 1", "for p in opt.param_groups[0]['params']: p.grad.clamp_(-1, 1)", before="n = 0"
        ),
    ),
    Loop(
        "hook_of_a_constant", setup=_hook("for g in opt.param_groups:", "    for p in g['params']: p.grad.mul_(scale)")
    ),
    Loop(
        "hook_by_the_rate",
        setup=_hook(
            "for g in opt.param_groups:", "    for p in g['params']: p.grad.add_(p, alpha=g['weight_decay'] * g['lr'])"
        ),
        after="for g in optimizer.param_groups: g['lr'] = 0.1 * 0.9 ** step.number",
    ),
    Loop(
        "collate_method_that_counts",
        setup="class Batches:\n"
        "    def __init__(self): self.n, self.pad = 0, 0\n"
        "    def make(self, samples):\n"
        "        self.n += 1\n"
        "        return torch.utils.data.default_collate(samples)\n"
        "batches = Batches()",
        given="collate=batches.make",
    ),
    Loop(
        "transform_that_stays",
        setup=_AUGMENT + "augment = Augment()\ndata = torch.utils.data.Subset(Folder(augment), range(32))",
    ),
    Loop("data_with_the_model", setup="data = torch.utils.data.Subset(data, range(32))\ndata.model = model"),
    Loop(
        "lambda_of_the_step",
        setup="warm = 3\nsched = lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / warm))",
        given="state={'sched': sched}",
        after="sched.step()",
    ),
    Loop(
        "average_with_a_function",
        setup="ema = AveragedModel(model, avg_fn=lambda e, p, n: 0.9 * e + 0.1 * p)",
        given="state={'ema': ema}",
        after="ema.update_parameters(model)",
    ),
    Loop(
        "order_made_anew",
        after="order = list(range(4))\n"
        "np.random.default_rng(step.number).shuffle(order)\n"
        "optimizer.param_groups[0]['lr'] = 0.1 / (1 + order[0])",
    ),
    Loop(
        "copied_for_people",
        setup="import shutil",
        after="torch.save(model.state_dict(), 'last.pt')\nif step.loss < 1: shutil.copy('last.pt', 'best.pt')",
    ),
    Loop("variable_that_is_only_set", after="os.environ['STEP'] = str(step.number)\nprint(os.getenv('STEP'))"),
    # ---- what is kept from batch to batch, and gives the same
    Loop(
        "opened_at_the_first_sample",
        setup=_READER.format(
            "if self.env is None:\n            self.env = sqlite3.connect(':memory:')\n"
            "            self.txn = self.env.cursor()\n        self.txn.execute('select 1')",
            "torch.ones(4) * self.txn.fetchone()[0]",
        ),
    ),
    Loop(
        "made_at_the_first_batch",
        setup="class Batches:\n"
        "    tok = pad = None\n"
        "    def make(self, samples):\n"
        "        if self.tok is None:\n"
        "            self.tok = collections.Counter()\n"
        "            self.pad = len(self.tok)\n"
        "        x, y = torch.utils.data.default_collate(samples)\n"
        "        return x + self.pad, y\n"
        "batches = Batches()",
        given="collate=batches.make",
    ),
    Loop(
        "shard_that_is_kept",
        setup=_READER.format(
            "shard = i // 8\n        if self.cur != shard: self.cur, self.rows = shard, np.load(f'{shard}.npy')",
            "torch.from_numpy(self.rows[i % 8])",
        ),
    ),
    Loop(
        "generator_seeded_for_each_sample",
        setup=_READER.format("self.gen.manual_seed(i)", "torch.rand(4, generator=self.gen)"),
    ),
    Loop(
        "numbers_seeded_for_each_sample", setup=_READER.format("self.rng.seed(i)", "torch.ones(4) * self.rng.random()")
    ),
    Loop(
        "state_set_for_each_sample",
        setup=_READER.format("self.rng.setstate(self.first)", "torch.ones(4) * self.rng.random()"),
    ),
    Loop(
        "file_sought_for_each_sample",
        setup=_READER.format("self.file.seek(i)", "torch.ones(4) * len(self.file.read(1))"),
    ),
    Loop(
        "features_by_a_hook",
        setup="feats = {}\ndef keep(module, args, out): feats['l4'] = out\nmodel[0].register_forward_hook(keep)",
        batch="model(x)\nstep.backward(feats['l4'].square().mean())",
    ),
    Loop(
        "read_by_index_that_iterates_too",
        setup=_READER.format("pass", "torch.ones(4)")
        + "def begin(self): return self\n"
        + "def go_on(self):\n    self.n += 1\n    return self[self.n - 1]\n"
        + "Reader.__iter__, Reader.__next__ = begin, go_on",
    ),
    Loop("mask_that_follows_the_batch", setup=_net("self.scale = self.scale.to(x.device)", "return self.l(x)")),
    *(
        Loop(
            f"mask_in_another_form_{k}",
            setup=_net(*lines, "return self.l(x * self.scale)") + "model.scale = torch.ones(4)",
        )
        for k, lines in enumerate(
            (
                ("self.scale = self.scale.to(x.device)",),
                ("if self.scale.device != x.device: self.scale = self.scale.to(x.device)",),
                ("self.scale = self.scale.to(x.dtype).contiguous()",),
                ("self.scale = self.scale.detach().float()",),
            )
        )
    ),
    Loop(
        "hook_that_prints_now_and_then",
        setup=_hook("global n", "n += 1", "if n % 100: return", "print(n)", before="n = 0"),
    ),
    Loop(
        "hook_that_gives_its_count",
        setup="n = [0]\ndef hook(*_):\n    n[0] += 1\n    return n[0]\noptimizer.register_step_post_hook(hook)",
    ),
    *(
        Loop(
            f"loss_of_the_parts_{name}",
            setup=_BLOCKS,
            batch=f"out = model(x)\nstep.backward(loss_fn(out, y) + sum(m.aux for m in model.blocks))\n{reset}",
        )
        for name, reset in {
            "of_a_list": "for m in model.blocks: m.aux = 0.0",
            "of_all": "for m in model.modules():\n    if hasattr(m, 'aux'): m.aux = 0.0",
            "by_a_method": "model.reset()",
        }.items()
    ),
]
