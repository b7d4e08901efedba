"""Effects of functions and methods that are not the user's, as far as their names tell."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CHANGING = _words(
    "append appendleft extend extendleft insert add update setdefault pop popleft popitem remove discard "
    "clear sort reverse rotate put put_nowait get_nowait push send step load_state_dict train eval "
    "requires_grad_ add_param_group update_parameters register_buffer register_module add_module observe "
    "tell ask record seed setstate set set_state manual_seed fill itemset resize partition __setitem__ "
    "__next__ __setattr__ subtract advance next tick"
)
"""Methods that change their object."""
FORGETTING = _words("clear popitem")
"""Methods that remove content."""
LOOKING = _words("get setdefault pop __getitem__ __contains__ move_to_end")
"""Methods whose result tells of one entry of a container, which their first argument names."""
SILENT = _words("append appendleft extend extendleft insert clear sort reverse __setitem__ __setattr__")
"""Methods whose result tells nothing."""
SILENT_HERE = _words("add update remove discard")
"""Methods whose result tells nothing, of the builtin containers."""
SHOWING = _words("tqdm track")
"""Functions that give what they are given, and show how far that is."""
MODES = _words("train eval")
"""Methods by which a worker evaluates alone, and that it undoes; workers compare the modes of their models."""
SETTING = _words("train eval requires_grad_ zero_grad copy_ zero_ fill_ manual_seed seed set_state setstate seek")
"""Methods after which the old content does not matter."""
FORMS = _words("to float half double bfloat16 contiguous detach cpu cuda")
"""Methods of a tensor whose result has the same content."""
ALIASING = _words(
    "parameters named_parameters buffers named_buffers modules named_modules children named_children "
    "state_dict values items get detach view reshape flatten view_as t transpose permute squeeze "
    "unsqueeze narrow select expand numpy unbind split chunk get_parameter get_submodule get_buffer "
    "__getitem__ __iter__ keys pop setdefault"
)
"""Methods whose result shares something with their object."""
PASSING = _words("list tuple iter reversed sorted filter chain from_iterable vars cast islice cycle set dict")
"""Functions whose result shares something with their arguments."""
DRAWS = _words(
    "rand randn randint randperm normal bernoulli multinomial rand_like randn_like randint_like random "
    "uniform choice choices shuffle sample gauss randrange permutation standard_normal getrandbits "
    "betavariate"
)
"""Draws from a global generator."""
SEEDS = _words("manual_seed seed manual_seed_all set_rng_state setstate set_state seed_everything")
"""Functions that set a global generator."""
SHAPES = _words("shape dtype device ndim")
"""Attributes of a tensor that do not depend on its numbers."""
VIEWS = _words("data grad")
"""Attributes of a tensor that change with it, or that an update takes."""
COPIES = _words("deepcopy copy clone parameters_to_vector state_dict")
"""Functions that copy."""
WRITES = _words(
    "save dump write_text write_bytes savez savetxt to_csv rename replace touch save_file save_pretrained "
    "savez_compressed tofile to_parquet"
)
"""Functions that write a file."""
MOVES = _words("copy copy2 copyfile copytree move")
"""Functions that write one file, or folder, from another."""
READS = _words(
    "load read_text read_bytes loadtxt read_csv fromfile exists is_file load_file from_pretrained read_parquet"
)
"""Functions that read a file."""
FIRST_CHANGED = _words(
    "heappush heappop heapify shuffle copyto delattr vector_to_parameters insort insort_left "
    "insort_right setitem delitem iadd isub imul itruediv pack_into at put place putmask fill_diagonal put_along_axis"
)
"""Functions that change their first argument."""
EXITS = _words("exit _exit quit")
"""Functions that end the process."""
TOGETHER = _words("evaluate barrier")
"""Acts that all workers must do in the same step."""
OPERATORS = {
    **{k: (f"__{n}__", f"__r{n}__") for k, n in (("Add", "add"), ("Sub", "sub"), ("Mult", "mul"), ("Div", "truediv"))},
    **{k: (f"__{n}__", f"__r{n}__") for k, n in (("FloorDiv", "floordiv"), ("Mod", "mod"), ("Pow", "pow"))},
    **{k: (f"__{n}__", f"__r{n}__") for k, n in (("MatMult", "matmul"), ("BitAnd", "and"), ("BitOr", "or"))},
    **{k: (f"__{n}__",) for k, n in (("Lt", "lt"), ("LtE", "le"), ("Gt", "gt"), ("GtE", "ge"), ("Eq", "eq"))},
    **{k: (f"__{n}__",) for k, n in (("NotEq", "ne"), ("In", "contains"), ("NotIn", "contains"))},
    **{k: (f"__{n}__",) for k, n in (("USub", "neg"), ("Invert", "invert"), ("Not", "bool"))},
}
"""By node of the syntax tree, the methods that an operator calls."""
CONVERTS = {n: (f"__{n}__",) for n in ("bool", "float", "int", "len", "abs", "round", "str", "iter", "next")}
"""By builtin function, the methods that it calls."""
REFUSING = _words("pop popleft popitem get_nowait remove index fetchone")
"""Methods that may raise if nothing is left in the object."""
