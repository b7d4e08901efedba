"""What the commands of `everstep plan` share: options for model, devices and job; results as JSON or as tables.

What is not given comes from the published model that is nearest and from the catalogue, and is listed as assumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from everstep.base.config import Config
from everstep.base.errors import ConfigError, did_you_mean
from everstep.cli.config_file import read_config_file
from everstep.cli.plan_config_dir import is_config, is_config_dir, shape_of_config
from everstep.cost import quantities
from everstep.cost.catalogue import CATALOGUE, DTYPES, DeviceKind, device_named
from everstep.cost.models import PUBLISHED, ModelShape, PublishedModel, check_shape, nearest_model, shape_of
from everstep.cost.step_time import STACKS, Fleet, SoftwareStack
from everstep.protocol.driver.saver import MEMORY_EVERY
from everstep.report.words import aligned

MOST_NODES, MOST_HOURS = 10**7, 10**6
LEAST, MOST = 50_000_000, 5 * 10**12
"""Numbers of parameters that have the shape of a published model."""

NOT_NEAR = (
    f"expected a number near a published model's, {quantities.count_words(LEAST)} to {quantities.count_words(MOST)}"
)
MOST_GPUS, MOST_PER_NODE = 10**6, 1024
SIZES = ("layers", "hidden", "heads", "vocab", "sequence", "experts", "experts_per_token")
CLUSTER = ("gpus", "gpu", "per_node", "network", "slowest")
"""Keys of a cluster's file, as the options without their dashes."""

DEVICE = ("peak_tflops", "memory", "bandwidth_gb_s", "link_gb_s", "network", "price", "mtbf", "source")
"""Keys of a device in a file of --catalogue."""

ASKED = "given, or as `assumed` says"
"""Source of a figure that is the question's own."""
COUNTED = "counted on torch's meta device"
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


_MODEL = (
    click.option("--params", metavar="N", help="Number of parameters: 13B. Its shape is that of the nearest model."),
    click.option(
        "--model", "model_name", metavar="NAME", help="A published model (llama3-8b), or a Hugging Face directory."
    ),
    click.option("--layers", type=int, help="Number of layers."),
    click.option("--hidden", type=int, help="Hidden size."),
    click.option("--heads", type=int, help="Number of attention heads."),
    click.option("--vocab", type=int, help="Size of the vocabulary."),
    click.option("--sequence", type=int, help="Tokens of a sequence."),
    click.option("--experts", type=int, help="Experts of each layer, for a mixture of experts."),
    click.option("--experts-per-token", type=int, help="Experts that a token goes through."),
)
_FLEET = (
    click.option("--cluster", type=click.Path(path_type=Path), help=f"YAML file with {', '.join(CLUSTER)}."),
    click.option("--gpus", type=click.IntRange(1, MOST_GPUS), help="Number of devices."),
    click.option("--gpu", "gpu_name", help="Device from the catalogue (a100-80)."),
    click.option("--per-node", type=click.IntRange(1, MOST_PER_NODE), help="Devices of a node (8)."),
    click.option("--network", metavar="RATE", help="Speed of each device's link to other nodes: 200Gb."),
    click.option("--slowest", type=float, help="Speed of the slowest device, as a share of the others' (1)."),
    click.option("--catalogue", type=click.Path(path_type=Path), help="YAML file of more devices."),
)
_JOB = (
    click.option("--batch", type=click.IntRange(1, 10**9), help="Sequences per step, on all devices together."),
    click.option("--tokens", metavar="N", help="Tokens to train on: 26B."),
    click.option("--samples", metavar="N", help="Sequences, or samples of a task, to train on: 10M."),
    click.option(
        "--dtype", help="Type of numbers in matrix products: bf16, fp16, fp32, fp8 (the device's best of 16 bits)."
    ),
    click.option("--stack", "stack_name", help=f"Program whose efficiency is assumed: {', '.join(STACKS)}."),
)


def question_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options for model, devices and job; `read_question` reads them."""
    for option in reversed((*_MODEL, *_FLEET, *_JOB)):
        command = option(command)
    return command


@dataclass(frozen=True)
class Question:
    """A model, devices and a job. batch_given: whether the user named it. assumed: in words."""

    shape: ModelShape
    fleet: Fleet
    batch: int
    batch_given: bool
    dtype: str
    stack: SoftwareStack
    tokens: int | None
    assumed: tuple[str, ...]

    def described(self) -> dict[str, Any]:
        """For results: the question as it was understood."""
        device = self.fleet.device
        return {
            "parameters": self.shape.parameters,
            "shape": asdict(self.shape),
            "device": device.name,
            "devices": self.fleet.count,
            "per_node": self.fleet.per_node,
            "network_bytes_per_s": self.fleet.network,
            "device_sources": dict(device.sources),
            "batch": self.batch,
            "dtype": self.dtype,
            "stack": asdict(self.stack),
            "tokens": self.tokens,
            "assumed": list(self.assumed),
        }

    def sources(self) -> dict[str, str]:
        """Sources of the figures of `described`, and of those of the devices, by key."""
        names = ("parameters", "shape", "devices", "per_node", "network_bytes_per_s", "batch", "tokens")
        return dict.fromkeys(names, ASKED) | {"stack": self.stack.calibrated} | device_sources(self.fleet.device)


def device_sources(device: DeviceKind) -> dict[str, str]:
    """Sources of the figures that come from a device, by key of a result."""
    return {"memory_bytes": device.sources["memory_gb"], "dollars": device.sources["price"]}


def source_lines(sources: Mapping[str, str]) -> list[str]:
    """Sources of what people look for first."""
    words = ("memory", "time", "goodput", "failures", "dollars")
    return [f"source of {word}: {sources[word]}" for word in words if word in sources]


def model_or_task(task: str | None, asked: dict[str, Any]) -> str | None:
    """The task; None, and `model_name` set, if it is a Hugging Face directory. Raises: ConfigError for two models."""
    if task is None or not is_config_dir(task):
        return task
    if asked["model_name"] is not None:
        raise ConfigError(f"expected {task[:80]} or --model, got both")
    asked["model_name"] = task
    return None


def read_question(asked: Mapping[str, Any]) -> Question:
    """The question that options ask. Raises: ConfigError, one line."""
    assumed: list[str] = []
    shape, near = read_shape(asked, assumed)
    fleet = read_fleet(asked, assumed)
    device = fleet.device
    dtype = asked["dtype"]
    if dtype is None:
        dtype = next(one for one in ("bf16", "fp16", "fp32") if one in device.peak)
        assumed.append(f"matrix products in {dtype}")
    if dtype not in device.peak:
        raise ConfigError(f"--dtype: expected one of {', '.join(device.peak)} on {device.name}, got {dtype[:40]!r}")
    stack = choose_stack(asked["stack_name"], device, assumed)
    batch = asked["batch"]
    if batch is None:
        batch = near.batch
        assumed.append(f"a batch of {batch} sequences, as {near.name} ({near.source})")
    tokens = quantities.parse_count(asked["tokens"], "--tokens") if asked["tokens"] is not None else None
    if asked["samples"] is not None:
        if tokens is not None:
            raise ConfigError("expected --tokens or --samples, got both")
        tokens = quantities.parse_count(asked["samples"], "--samples") * shape.sequence
    if tokens is not None and tokens < batch * shape.sequence:
        raise ConfigError(f"expected --tokens or --samples for at least one step ({batch} x {shape.sequence} tokens)")
    return Question(shape, fleet, batch, asked["batch"] is not None, dtype, stack, tokens, tuple(assumed))


def choose_stack(name: str | None, device: DeviceKind, assumed: list[str]) -> SoftwareStack:
    """The program whose efficiency is taken. Raises: ConfigError, one line."""
    wanted = ("torchtitan-compile" if "fp8" in device.peak else "megatron-2021") if name is None else name
    if name is None:
        assumed.append(f"efficiency of {wanted} ({STACKS[wanted].calibrated})")
    return read_stack(wanted)


def read_stack(name: str) -> SoftwareStack:
    """The program of this name. Raises: ConfigError, one line."""
    if name not in STACKS:
        raise ConfigError(f"--stack: expected one of {', '.join(STACKS)}, got {name[:40]!r}")
    return STACKS[name]


def read_shape(asked: Mapping[str, Any], assumed: list[str]) -> tuple[ModelShape, PublishedModel]:
    """The model's shape, and the published model from which other figures come. Raises: ConfigError, one line."""
    sizes = {key: asked[key] for key in SIZES if asked[key] is not None}
    own = all(key in sizes for key in ("layers", "hidden", "heads"))
    if (asked["params"] is not None) + (asked["model_name"] is not None) + own != 1:
        raise ConfigError("expected one of --params 13B, --model NAME, or --layers, --hidden and --heads")
    if own:
        shape = check_shape(ModelShape(**sizes))
        assumed += [f"{getattr(shape, key)} as --{key}" for key in ("vocab", "sequence") if key not in sizes]
        return shape, nearest_model(shape.parameters)
    if asked["model_name"] is not None and is_config(asked["model_name"]):
        found, taken = shape_of_config(asked["model_name"])
        assumed += taken
        shape = check_shape(replace(found, **sizes))
        return shape, nearest_model(shape.parameters)
    if asked["model_name"] is not None:
        known = {model.name: model for model in PUBLISHED}
        near = known.get(asked["model_name"].lower())
        if near is None:
            close = did_you_mean(asked["model_name"], known, "{}")
            raise ConfigError(f"--model: expected one of {', '.join(known)}, got {asked['model_name'][:40]!r}{close}")
        return check_shape(replace(near.shape, **sizes)), near
    wanted = quantities.parse_count(asked["params"], "--params")
    near = nearest_model(wanted)
    scaled = near.shape if "layers" in sizes else shape_of(wanted, near)
    if scaled is None:
        raise ConfigError(f"--params: {NOT_NEAR}, got {asked['params'][:40]}: give --layers, --hidden and --heads")
    shape = check_shape(replace(scaled, **sizes))
    counted = quantities.count_words(shape.parameters)
    assumed.append(
        f"the shape of {near.name}, {shape.layers} layers: {counted} parameters, sequences of {shape.sequence} "
        f"({near.source})"
    )
    return shape, near


def read_fleet(asked: Mapping[str, Any], assumed: list[str]) -> Fleet:
    """The devices that options name, or the file of --cluster. Raises: ConfigError, one line."""
    given = _cluster(asked)
    if given["gpus"] is None:
        raise ConfigError("expected --gpus, or --cluster FILE with it: --gpus 32 --gpu a100-80")
    known = known_devices(asked["catalogue"])
    if given["gpu"] is None:
        assumed.append("devices a100-80")
    if given["per_node"] is None:
        assumed.append("8 devices per node")
    device = device_named("a100-80" if given["gpu"] is None else given["gpu"], known)
    count, per_node = given["gpus"], given["per_node"] or 8
    slowest = 1.0 if given["slowest"] is None else given["slowest"]
    if not 0.01 <= slowest <= 1:
        raise ConfigError(f"--slowest: expected a share of the others' speed, from 0.01 to 1, got {slowest:g}")
    if given["per_node"] is not None and per_node > count:
        raise ConfigError(f"--per-node: expected at most --gpus ({count}), got {per_node}")
    if count > per_node and count % per_node:
        raise ConfigError(f"--gpus: expected whole nodes of {per_node} (--per-node), got {count}")
    network = given["network"]
    if network is not None:
        return Fleet(device, count, min(per_node, count), quantities.parse_rate(network, "--network"), slowest)
    if count > per_node:
        assumed.append(f"{device.network * 8 / 1e9:g} Gb/s between nodes for each device ({device.sources['network']})")
    return Fleet(device, count, min(per_node, count), device.network, slowest)


def _cluster(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `CLUSTER`, None where not given; those of options before those of the file. Raises: ConfigError."""
    options = {key: asked["gpu_name" if key == "gpu" else key] for key in CLUSTER}
    path = asked["cluster"]
    if path is None:
        return options
    file = read_config_file(path)
    for key, value in file.items():
        if key not in CLUSTER:
            near = did_you_mean(key, CLUSTER, "{}")
            raise ConfigError(f"{path}: expected some of {', '.join(CLUSTER)}, got {key[:40]!r}{near}")
        most = {"gpus": MOST_GPUS, "per_node": MOST_PER_NODE}.get(key)
        if most is not None and (type(value) is not int or not 1 <= value <= most):
            raise ConfigError(f"{path}: {key}: expected a whole number from 1 to {most}, got {str(value)[:40]!r}")
        if key in ("gpu", "network") and not isinstance(value, str):
            raise ConfigError(f"{path}: {key}: expected text such as a100-80 or 200Gb, got {str(value)[:40]!r}")
        if key == "slowest" and type(value) not in (int, float):
            raise ConfigError(f"{path}: {key}: expected a number from 0.01 to 1, got {str(value)[:40]!r}")
    return {**file, **{key: value for key, value in options.items() if value is not None or key not in file}}


def known_devices(path: Path | None) -> dict[str, DeviceKind]:
    """Devices of the catalogue, and of a YAML file: name -> figures. Raises: ConfigError, also for a missing figure."""
    found = dict(CATALOGUE)
    if path is None:
        return found
    for name, given in read_config_file(path).items():
        try:
            found[name.lower()] = _device(name.lower(), given)
        except (KeyError, TypeError, AttributeError) as error:
            missing = f"no {error.args[0]}" if isinstance(error, KeyError) else "something else"
            raise ConfigError(
                f"{path}: {name[:40]}: expected peak_tflops (bf16: 312, ...), memory (80GB), bandwidth_gb_s, "
                f"link_gb_s, network (200Gb), price (dollars per hour), mtbf (30000h) and source, got {missing}"
            ) from None
    return found


def _device(name: str, given: Mapping[str, Any]) -> DeviceKind:
    def positive(value: Any, what: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise ConfigError(f"{name[:40]}: {what}: expected a number above 0, got {str(value)[:40]!r}")
        return float(value)

    for key in given:
        if key not in DEVICE:
            near = did_you_mean(str(key), DEVICE, "{}")
            raise ConfigError(f"{name[:40]}: expected {', '.join(DEVICE)}, got {str(key)[:40]!r}{near}")
    peak = {str(dtype): positive(value, f"peak_tflops.{dtype}") * 1e12 for dtype, value in given["peak_tflops"].items()}
    if not set(peak) <= set(DTYPES) or not set(peak) & {"fp32", "fp16", "bf16"}:
        raise ConfigError(
            f"{name[:40]}: peak_tflops: expected some of {', '.join(DTYPES)}, got {', '.join(peak)[:80]!r}"
        )
    figures = ("peak", "memory_gb", "bandwidth", "link", "network", "price", "mtbf_h")
    source = given["source"]
    if not isinstance(source, str) or not source.strip():
        raise ConfigError(f"{name[:40]}: source: expected words on where the figures come from, got {source!r:.40}")
    return DeviceKind(
        name,
        peak,
        quantities.parse_bytes(str(given["memory"]), f"{name[:40]}: memory") / 1e9,
        positive(given["bandwidth_gb_s"], "bandwidth_gb_s") * 1e9,
        positive(given["link_gb_s"], "link_gb_s") * 1e9,
        quantities.parse_rate(str(given["network"]), f"{name[:40]}: network"),
        positive(given["price"], "price"),
        quantities.parse_seconds(str(given["mtbf"]), f"{name[:40]}: mtbf") / 3600,
        dict.fromkeys(figures, source),
    )


def hours_within(value: float, what: str) -> float:
    """A number of hours. Raises: ConfigError outside of 0 to 10^6, for what is no number, too."""
    if not 0 < value <= MOST_HOURS:
        raise ConfigError(f"{what}: expected more than 0 and at most {MOST_HOURS:.0e} hours, got {value:g}")
    return value


def mtbf_hours(text: str) -> float:
    """Hours between failures, from --mtbf."""
    return quantities.parse_seconds(text, "--mtbf") / 3600


def not_given(words: Mapping[str, str]) -> list[str]:
    """Assumptions for parameters of the running command that were left out. words: the assumption, by parameter."""
    asked = click.get_current_context()
    return [said for name, said in words.items() if asked.get_parameter_source(name) is ParameterSource.DEFAULT]


def snapshots_of(config: Config, steps: int | None = None) -> int:
    """Copies of as much state as it has that the fullest worker of a job keeps in memory, after so many steps (None:
    at the most): the newest, one on its way, and one that was compared, once states were compared. Where the model is
    cut into stages, of its own state and of that of another stage.

    Source: jobs of three stages held 4.1 copies before the first comparison, 5.7 to 6.7 after it, and 8 under load.
    """
    rule, split = config.checkpoint.memory, config.stages > 1
    if not (split or rule.every_steps or rule.every_epochs or rule.every_minutes):
        return 0
    compared = steps is None or 0 < config.verify_every <= steps
    most = rule.keep_last + 1 + compared
    taken = most if steps is None else min(most, steps // (rule.every_steps or MEMORY_EVERY))
    return (1 + split) * taken


def recovery_times(changed: Sequence[str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Seconds by name from the package, some of them changed by NAME=TIME; and what each is, with its source.

    Raises: ConfigError for a name that is unknown, or no time.
    """
    kinds = json.loads(resources.files("everstep.cost").joinpath("recovery_times.json").read_bytes())
    dated = {kind: group for kind, group in kinds.items() if "date" in group}
    where = {kind: f"{group['source']}, {group['date']}; {group['machine']}" for kind, group in dated.items()}
    about = {
        name: {"name": name, "seconds": float(seconds), "what": what, "source": where.get(kind, kind)}
        for kind, group in kinds.items()
        for name, (seconds, what) in group["seconds"].items()
    }
    for one in changed:
        name, _, text = one.partition("=")
        if name not in about:
            near = did_you_mean(name, about, "{}")
            raise ConfigError(f"--time: expected NAME=TIME with one of {', '.join(about)}, got {name[:40]!r}{near}")
        about[name] |= {"seconds": quantities.parse_seconds(text, f"--time {name}"), "source": "given"}
    return {name: one["seconds"] for name, one in about.items()}, list(about.values())


def say(result: dict[str, Any], as_json: bool, lines: Sequence[str]) -> None:
    """Print a result: one JSON object with sorted keys, or lines for people."""
    if as_json:
        print(json.dumps(result, sort_keys=True, allow_nan=False))
        return
    for line in lines:
        print(line)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns, and an empty line after them."""
    return [*aligned([list(row) for row in rows]), ""]
