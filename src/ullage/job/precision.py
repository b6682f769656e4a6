"""``precision``: the short names resolved by engine, and the mapping form.

Which element type plays which role is the engine's doing, so one table holds them all:

- torch engines keep fp32 parameters, which are the master copy. ddp, zero1 and single compute under autocast, which casts a
  weight where it is used; FSDP gathers the shard in the compute type (MixedPrecision / MixedPrecisionPolicy) and needs none. It
  reduces in fp32 as torchtitan and Composer set it, in the compute type as accelerate does (utils/dataclasses.py,
  FullyShardedDataParallelPlugin.set_mixed_precision).
- DeepSpeed casts the module itself and keeps fp32 masters in the optimizer; gradients follow the module unless
  ``grad_accum_dtype`` or its BF16_Optimizer says fp32 (runtime/engine.py, get_data_types). With ``torch_autocast`` the module
  stays fp32 and the engine behaves like torch's own.
- Megatron does the same with fp32 main gradients for bf16 (arguments.py sets accumulate_allreduce_grads_in_fp32), and
  gradients in the parameters' type for fp16 unless that flag is given.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.errors import Contradiction, InvalidInput
from ullage.frozen import replace
from ullage.job import fields
from ullage.job.engine import under_accelerate
from ullage.job.fields import Section, hint, show
from ullage.job.job import Precision
from ullage.job.options.spec import DTYPE_ALIASES

SHORT_NAMES = ("fp32", "bf16-mixed", "fp16-mixed", "bf16", "fp8-mixed")
DEFAULT = "bf16-mixed"

_HALF = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp8-mixed": "bf16"}
_AUTOCAST_ENGINES = frozenset({"single", "ddp", "zero1"})
_FSDP_ENGINES = frozenset({"fsdp1", "fsdp2"})
# These hold the master copy in the optimizer, apart from the module's own parameters, whatever the types are.
_SEPARATE_MASTER_ENGINES = frozenset({"deepspeed", "megatron"})

_storage = fields.choice("fp32", "bf16", "fp16", aliases=DTYPE_ALIASES)
_compute = fields.choice("fp32", "bf16", "fp16", "fp8", "fp4", aliases=DTYPE_ALIASES)


def resolve(name: str, engine: str, options: Mapping[str, object], stack: str) -> Precision:
    """The short ``name`` on ``engine``, its options and who calls it considered."""
    if name == "fp32":
        return Precision(params="fp32", compute="fp32", grads="fp32", master="fp32", reduce="fp32")
    if name == "bf16":
        precision = Precision(params="bf16", compute="bf16", grads="bf16", master=None, reduce="bf16")
        return replace(precision, reduce=_dtype(options, "reduce_dtype", "bf16"))
    half = _HALF[name]
    if engine in _AUTOCAST_ENGINES or (engine == "deepspeed" and options.get("torch_autocast") is True):
        precision = Precision(params="fp32", compute=half, grads="fp32", master="fp32", reduce="fp32", autocast=True)
    elif engine in _FSDP_ENGINES:
        reduce = _dtype(options, "reduce_dtype", half if under_accelerate(stack, options) else "fp32")
        precision = Precision(params="fp32", compute=half, grads="fp32", master="fp32", reduce=reduce)
    elif engine == "deepspeed":
        grads = _dtype(options, "grad_accum_dtype", "fp32" if options.get("bf16_optimizer") is True else half)
        reduce = _dtype(options, "communication_data_type", half)
        precision = Precision(params=half, compute=half, grads=grads, master="fp32", reduce=reduce)
    else:
        grads = _megatron_grads(half, options)
        master = _dtype(options, "main_params_dtype", "fp32")
        precision = Precision(params=half, compute=half, grads=grads, master=master, reduce=grads)
    if name == "fp8-mixed":
        gathered = options.get("fp8_param_gather") is True or options.get("fp8_param") is True
        precision = replace(precision, compute="fp8", fp8_params=gathered)
    return precision


def _megatron_grads(half: str, options: Mapping[str, object]) -> str:
    in_fp32 = options.get("accumulate_allreduce_grads_in_fp32", half == "bf16") is True
    if options.get("grad_reduce_in_bf16") is True:
        in_fp32 = False
    return _dtype(options, "main_grads_dtype", "fp32" if in_fp32 else half)


def _dtype(options: Mapping[str, object], name: str, default: str) -> str:
    return str(options.get(name, default))


def read_precision(root: Section, engine: str, options: Mapping[str, object], stack: str) -> Precision:
    """``precision`` in either form."""
    value = root.raw("precision")
    if not root.written("precision"):
        root.note("precision", DEFAULT)
        value = DEFAULT
    if isinstance(value, str):
        if value not in SHORT_NAMES:
            raise InvalidInput(
                "is not known",
                key="precision",
                value=value,
                allowed=", ".join(SHORT_NAMES) + ", or a mapping such as {params: bf16, master: fp32}",
                remedy=hint(value, SHORT_NAMES),
            )
        return resolve(value, engine, options, stack)
    section = root.inner("precision")
    own_master: str | None = "fp32"
    precision = Precision(
        params=section.take("params", _storage, "bf16"),
        compute=section.take("compute", _compute, "bf16"),
        grads=section.take("grads", _storage, "fp32"),
        master=section.take("master", fields.optional(_storage), own_master),
        reduce=section.take("reduce", _storage, "fp32"),
        autocast=section.take("autocast", fields.flag, False),
        fp8_params=section.take("fp8_params", fields.flag, False),
    )
    section.close()
    if precision.fp8_params and precision.compute not in ("fp8", "fp4"):
        raise Contradiction(
            f"8-bit parameters are computed with in 8 bits, and precision.compute is {show(precision.compute)}",
            key="precision.fp8_params",
            value="true",
            remedy="set precision.compute to fp8, or fp8_params to false",
        )
    return _one_copy(precision, engine)


def _one_copy(precision: Precision, engine: str) -> Precision:
    """A 16-bit master of the parameters' own type is the parameters, except where the optimizer keeps masters apart."""
    same = precision.master == precision.params != "fp32"
    return replace(precision, master=None) if same and engine not in _SEPARATE_MASTER_ENGINES else precision
