"""Files of other trainers: what a layout becomes in them, what they become here, and what is named.

The oracles are the trainers' own options as their documentation has them, written out by hand.
"""

from __future__ import annotations

import importlib
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest

from phalanx.layout import Layout, LayoutError, Shape
from phalanx.layout.trainer_facts import Job, unlike
from phalanx.layout.trainer_read import (
    Given,
    Reading,
    blocks_of_text,
    read_options,
    read_trainer_file,
)
from phalanx.layout.trainer_table import (
    FLAGS,
    JSON,
    TOML,
    trainer_named,
    trainers,
)
from phalanx.layout.trainer_text import options_of
from phalanx.layout.trainer_write import Written, can_say, written

SUFFIX = {FLAGS: ".sh", TOML: ".toml", JSON: ".json"}
BATCH, SEQUENCE = 512, 8192


def file_of(layout: str, trainer: str, model: str = "8b") -> Written:
    job = Job(Layout.parse(layout), Shape.load(model), BATCH, SEQUENCE)
    return written(job, trainer_named(trainer))


def read(tmp_path: Path, text: str, name: str, **given: Any) -> Reading:
    path = tmp_path / name
    path.write_text(text)
    return read_trainer_file(str(path), "", Given(**given))


def back(tmp_path: Path, file: Written, **given: Any) -> Reading:
    suffix = SUFFIX.get(file.trainer.format, ".yaml")
    ranks = file.job.layout.ranks
    return read(tmp_path, file.text, f"file{suffix}", ranks=ranks, **given)


# ---- round trips

BOTH = {
    "megatron": [
        "tp8 seq bf16", "dp8 tp8 seq zero1 accum:16 bf16", "dp8 accum:4 bf16", "dp4 fp16 accum:8",
        "pp2 dp4 tp8 seq zero1 interleaved4:32 recompute:all bf16",
        "dp4 pp2 tp8 seq zero1 1f1b:16 bf16", "pp4 dp2 cp2 tp4 zero1 1f1b:16 recompute:selective bf16",
        "pp4 tp2 1f1b:16 stages:6-9-9-8 bf16", "dp2x32 zero1 accum:4 bf16", "dp64 zero3 accum:8 bf16",
        "dp16 cp4:ulysses zero2 accum:32 bf16", "dp8 recompute:every=2 zero1 bf16 accum:16",
        "dp8 zero1 bf16 fp8:tile accum:8", "dp8 zero1 mxfp8 bf16 accum:8", "dp8 fp8 bf16 accum:8",
        "dp8 fp8:e5m2 bf16 accum:8", "dp8 zero1 offload:optimizer bf16 accum:4",
    ],
    "torchtitan": [
        "dp64 zero3 accum:8 bf16", "dp2x32 zero3 accum:4 recompute:all bf16 compile", "dp8 bf16 accum:8",
        "pp2 dp8 tp4 seq zero3 interleaved2:32 bf16", "pp4 dp8 tp2 seq zero2 1f1b:32 bf16",
        "pp2 dp8 cp4 zero3 zb-v:32 bf16", "pp2 dp4 tp8 seq zero3 dualpipe-v:32 bf16 recompute:selective",
        "pp2 dp4 zero3 gather:micro gpipe:8 bf16", "dp8 zero3 accum:16 fp8 bf16 compile", "tp8 seq bf16",
        "dp8 zero3 offload:weights bf16 accum:8",
    ],
    "deepspeed": [
        "dp8 zero1 accum:16 bf16", "dp64 zero3 accum:4 bf16", "dp4x16 zero3 accum:8 bf16", "dp8 fp16",
        "dp8 zero2 offload:optimizer accum:4 bf16", "dp8 zero3 offload:weights,optimizer accum:4 bf16",
        "dp16 cp4:ulysses zero3 accum:32 bf16", "dp8 tp4 zero1 accum:8 bf16",
    ],
    "accelerate": [
        "dp8 bf16", "dp64 zero3 accum:4 recompute:all bf16", "dp64 zero2 bf16 accum:8", "dp8 zero1 fp16",
        "dp2x32 zero3 bf16 accum:4", "dp8 tp8 zero3 accum:16 bf16", "dp16 cp4 zero3 accum:32 bf16",
        "dp8 zero3 offload:weights bf16 compile", "dp8 zero1 offload:optimizer bf16",
    ],
}  # fmt: skip
BOTH["nemo"] = [x for x in BOTH["megatron"] if "e5m2" not in x]
ROUNDS = [
    (name, layout) for name, layouts in BOTH.items() for layout in layouts
]


@pytest.mark.parametrize(("name", "layout"), ROUNDS)
def test_a_layout_that_both_can_say_comes_back(
    name: str, layout: str, tmp_path: Path
) -> None:
    file = file_of(layout, name)
    assert file.unsaid == ()
    sized = {} if file.trainer.sized else {"model": file.job.shape}
    asked = (
        {"microbatches": file.job.layout.microbatches}
        if name == "accelerate"
        else {}
    )
    reading = back(tmp_path, file, **sized, **asked)
    assert reading.faults == ()
    assert reading.trainer.name == name
    assert reading.job.layout == file.job.layout
    assert reading.job.batch == BATCH
    if file.trainer.written.get("sequence"):
        assert reading.job.sequence == SEQUENCE


MODELS = ["124m", "1b", "8b", "70b", "405b", "30b-a3b", "8x7b"]


@pytest.mark.parametrize("name", ["megatron", "nemo"])
@pytest.mark.parametrize("model", MODELS)
def test_a_models_sizes_come_back(
    name: str, model: str, tmp_path: Path
) -> None:
    shape = Shape.load(model)
    job = Job(Layout.parse("dp8 bf16"), shape, 512, shape.sequence)
    reading = back(tmp_path, written(job, trainer_named(name)))
    assert reading.job.shape is not None
    assert not unlike(shape, reading.job.shape)


def test_deepseeks_sizes_come_back_but_for_its_router(tmp_path: Path) -> None:
    file = file_of("dp64 ep8 zero1 bf16", "megatron", "deepseek-v3")
    reading = back(tmp_path, file)
    assert reading.job.shape is not None
    left = [
        "expert_groups",
        "top_groups",
        "scores",
        "routed_scale",
        "balance",
        "rope_pairs",
    ]
    assert list(unlike(Shape.load("deepseek-v3"), reading.job.shape)) == left
    biases = 58 * 256  # of the routers
    whole = Shape.load("deepseek-v3").total
    assert reading.job.shape.total == whole - biases
    (told,) = [x for x in file.elsewhere if "keys of the model" in x]
    assert all(key in told for key in left)


@pytest.mark.parametrize(
    ("layout", "theirs"),
    [
        ("pp2 dp4 ep8 zero1 1f1b:8 bf16", {"--expert-model-parallel-size": "8"}),
        ("dp4 ep4 tp2 seq experts:tp zero1 bf16",
         {"--expert-model-parallel-size": "8", "--expert-tensor-parallel-size": "1"}),
        ("dp4 ep4 tp2 seq zero1 bf16",
         {"--expert-model-parallel-size": "4", "--expert-tensor-parallel-size": "2"}),
        ("dp4 ep2 cp4 experts:cp zero1 bf16", {"--expert-model-parallel-size": "8"}),
    ],
)  # fmt: skip
def test_expert_groups_count_the_ranks_of_tp_and_cp_inside(
    layout: str, theirs: dict[str, str], tmp_path: Path
) -> None:
    """Megatron-Core's expert groups take the ranks of tp (with whole experts), then of cp, then of dp."""
    file = file_of(layout, "megatron", "30b-a3b")
    assert file.unsaid == ()
    options = options_of(file.text, FLAGS, "")
    assert {key: options[key] for key in theirs} == theirs
    assert back(tmp_path, file).job.layout == file.job.layout


# ---- what is written


def test_megatrons_flags_are_those_of_its_documentation() -> None:
    layout = "pp2 dp4 tp8 seq zero1 interleaved2:32 recompute:all stages:8-8-8-8 bf16"
    options = options_of(file_of(layout, "megatron").text, FLAGS, "")
    theirs = {
        "--tensor-model-parallel-size": "8", "--pipeline-model-parallel-size": "2",
        "--num-virtual-stages-per-pipeline-rank": "2", "--sequence-parallel": True,
        "--use-distributed-optimizer": True, "--micro-batch-size": "4", "--global-batch-size": "512",
        "--seq-length": "8192", "--num-layers": "32", "--hidden-size": "4096", "--ffn-hidden-size": "14336",
        "--num-attention-heads": "32", "--num-query-groups": "8", "--group-query-attention": True,
        "--recompute-granularity": "full", "--recompute-method": "uniform", "--bf16": True,
        "--nnodes": "8", "--nproc-per-node": ["8", "pretrain_gpt.py"], "--swiglu": True,
        "--normalization": "RMSNorm",
    }  # fmt: skip
    assert {key: options.get(key) for key in theirs} == theirs
    assert "--pipeline-model-parallel-layout" not in options


def test_torchtitans_file_has_its_sections() -> None:
    text = file_of(
        "pp2 dp2x4 tp4 seq zero3 interleaved2:32 bf16 compile", "torchtitan"
    ).text
    table = tomllib.loads(text)
    assert table["parallelism"] == {
        "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4,
        "tensor_parallel_degree": 4, "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "Interleaved1F1B", "pipeline_parallel_microbatch_size": 2,
        "fsdp_reshard_after_forward": "default",
    }  # fmt: skip
    assert table["training"]["local_batch_size"] == 64
    assert table["training"]["global_batch_size"] == 512
    assert table["model"] == {"name": "llama3", "flavor": "8B"}
    assert table["compile"]["enable"] is True


def test_deepspeeds_batch_is_the_product_that_it_asks_for() -> None:
    file = json.loads(file_of("dp8 zero2 accum:16 bf16", "deepspeed").text)
    assert file["train_batch_size"] == 512
    assert file["train_micro_batch_size_per_gpu"] * 16 * 8 == 512
    assert file["gradient_accumulation_steps"] == 16
    assert file["zero_optimization"] == {"stage": 2}
    assert file["bf16"] == {"enabled": True}


def test_accelerates_file_is_yaml_that_pyyaml_reads() -> None:
    yaml = importlib.import_module("yaml")
    file = file_of("dp2x8 tp4 zero3 recompute:all bf16", "accelerate")
    table = yaml.safe_load(file.text)
    assert table["distributed_type"] == "FSDP"
    assert table["num_processes"] == 64
    assert table["mixed_precision"] == "bf16"
    assert table["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert table["fsdp_config"]["fsdp_activation_checkpointing"] is True
    sizes = table["parallelism_config"]
    assert sizes["parallelism_config_dp_replicate_size"] == 2
    assert sizes["parallelism_config_dp_shard_size"] == 8
    assert sizes["parallelism_config_tp_size"] == 4
    assert any(
        "per_device_train_batch_size to 32" in x for x in file.elsewhere
    )


@pytest.mark.parametrize("layout", BOTH["accelerate"])
def test_accelerate_itself_takes_its_file(layout: str, tmp_path: Path) -> None:
    config = importlib.import_module("accelerate.commands.config.config_args")
    parallel = importlib.import_module("accelerate.parallelism_config")
    file = file_of(layout, "accelerate")
    path = tmp_path / "config.yaml"
    path.write_text(file.text)
    read = config.ClusterConfig.from_yaml_file(str(path))
    assert read.num_processes == file.job.layout.ranks
    prefix = "parallelism_config_"
    sizes = {
        k.removeprefix(prefix): v for k, v in read.parallelism_config.items()
    }
    sizes.pop("cp_comm_strategy", None)
    if sizes:
        assert (
            parallel.ParallelismConfig(**sizes).total_size
            == read.num_processes
        )


# ---- what is named

UNSAID = [
    ("megatron", "pp4 zb-h1:16 bf16", "zb-h1: Megatron-LM runs 1F1B and interleaved"),
    ("megatron", "dp8 compile bf16", "compile: "),
    ("megatron", "dp8 offload:weights zero3 bf16", "offload:weights: "),
    ("megatron", "dp8 zero3 gather:step bf16", "gather:step: "),
    ("megatron", "cp4:2x2 bf16", "a2a+p2p"),
    ("torchtitan", "pp4 zb-h1:16 bf16", "zb-h1: of schedules torchtitan names"),
    ("torchtitan", "cp4:ulysses bf16", "cp:ulysses: torchtitan has no Ulysses."),
    ("torchtitan", "dp8 zero1 bf16", "zero1: "),
    ("torchtitan", "tp8 bf16", "no seq: "),
    ("torchtitan", "dp4 pp2 1f1b:8 bf16", "order:dp pp: "),
    ("torchtitan", "dp8 fp16", "fp16: "),
    ("torchtitan", "pp4 1f1b:8 stages:6-9-9-8 bf16", "stages"),
    ("deepspeed", "pp2 1f1b:8 bf16", "pp2: stages of a pipeline are made in the script"),
    ("deepspeed", "dp4 tp2 seq bf16", "seq: AutoTP"),
    ("deepspeed", "dp8 tp2 zero3 bf16", "AutoTP goes with stages 0 to 2"),
    ("deepspeed", "dp8 recompute:all bf16", "recompute:all: "),
    ("deepspeed", "cp4 bf16", "cp:ring: DeepSpeed has no ring"),
    ("deepspeed", "dp2x4 zero1 bf16", "dp2x4 zero1: "),
    ("accelerate", "pp2 1f1b:8 bf16", "pp2: "),
    ("accelerate", "dp2 tp4 bf16", "plain DDP"),
    ("accelerate", "dp8 recompute:all bf16", "another value of distributed_type"),
    ("accelerate", "dp8 recompute:selective zero3 bf16", "recompute:selective: "),
    ("nemo", "pp4 zb-v:16 bf16", "zb-v: "),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "told"), UNSAID)
def test_what_a_trainer_cannot_say_is_named(
    name: str, layout: str, told: str
) -> None:
    file = file_of(layout, name)
    assert any(told in sentence for sentence in file.unsaid), file.unsaid
    assert not file.whole
    shape = Shape.load("8b")
    assert not can_say(file.job.layout, shape, file.trainer, BATCH)


def test_experts_are_named_where_a_trainer_has_none() -> None:
    for name in ("deepspeed", "accelerate"):
        file = file_of("dp4 ep8 bf16", name, "8x7b")
        assert any(sentence.startswith("ep8: ") for sentence in file.unsaid)


def test_every_choice_of_a_layout_is_said_or_named() -> None:
    """No word of a layout is dropped by a trainer: what does not come back has a sentence."""
    words = (
        *(
            "zero1",
            "zero2",
            "zero3",
            "seq",
            "overlap",
            "prefetch:2",
            "reduce:micro",
        ),
        *(
            "recompute:all",
            "recompute:selective",
            "recompute:sqrt",
            "recompute:every=4",
        ),
        *(
            "offload:weights",
            "offload:optimizer",
            "offload:activations",
            "compile",
        ),
        *("fp16", "tf32", "fp64", "fp8", "fp8:tile", "mxfp8", "fp8:experts"),
        "compile:max",
        "compile:graphs",
    )
    shape = Shape.load("8b")
    for trainer in trainers().values():
        plain = written(
            Job(Layout.parse("dp4 tp2 accum:8"), shape, 64, 4096), trainer
        )
        for word in words:
            try:
                layout = Layout.parse(f"dp4 tp2 accum:8 {word}")
            except LayoutError:
                continue
            file = written(Job(layout, shape, 64, 4096), trainer)
            said = file.options, file.unsaid
            assert said != (plain.options, plain.unsaid), (trainer.name, word)


# ---- what is read

SCRIPT = """
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-4}
TP=2
MBS=1
GBS=$((MBS * GPUS_PER_NODE * NUM_NODES * 4 / TP))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES  # don't change
    --master_addr ${MASTER_ADDR:-localhost}
)
GPT_ARGS="
    --num-layers 32 --hidden-size 4096 \\
    --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --vocab-size 128256
    --seq-length 8192 --max-position-embeddings 8192 --swiglu
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights
"
OTHER=("--fp8-format hybrid" --bf16)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $GPT_ARGS ${OTHER[@]} \\
    --tensor-model-parallel-size=$TP --micro-batch-size $MBS --global-batch-size $GBS
"""


def test_a_shell_scripts_names_defaults_and_sums_are_read(
    tmp_path: Path,
) -> None:
    reading = read(tmp_path, SCRIPT, "train.sh")
    assert str(reading.job.layout) == "dp16 tp2 accum:4 bf16 fp8:e5m2"
    assert reading.job.batch == 64
    assert reading.job.shape is not None
    assert reading.job.shape.total == Shape.load("8b").total
    assert reading.faults == ()


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    text = f"X=$(touch {ran})\nY=`touch {ran}`\n{SCRIPT}--eval-iters $(touch {ran})"
    read(tmp_path, text, "train.sh")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("Et*3|(tt|)*29,m|L", (3, *[2] * 29, 0, 0)), ("Etttt|tttL", (4, 3)),
        ([["embedding", "decoder"], ["decoder", "decoder", "loss"]], (1, 2)),
    ],
)  # fmt: skip
def test_megatrons_stages_are_counted(
    text: Any, blocks: tuple[int, ...]
) -> None:
    assert blocks_of_text(text) == blocks


def test_layers_of_a_chunk_are_chunks(tmp_path: Path) -> None:
    text = SCRIPT + " --pipeline-model-parallel-size 4 --bf16"
    text += " --num-layers-per-virtual-pipeline-stage 2"
    layout = read(tmp_path, text, "train.sh").job.layout
    assert (layout.pp, layout.schedule, layout.chunks) == (4, "interleaved", 4)


def test_the_older_names_of_nemo_are_read(tmp_path: Path) -> None:
    text = """
trainer: {devices: 8, num_nodes: 2, precision: bf16}
model:
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  sequence_parallel: true
  micro_batch_size: 2
  global_batch_size: 64
  encoder_seq_length: 4096
  num_layers: 16
  hidden_size: 2048
  ffn_hidden_size: 8192
  num_attention_heads: 32
  activation: fast-swiglu
  normalization: rmsnorm
  position_embedding_type: rope
  bias: false
  share_embeddings_and_output_weights: false
  activations_checkpoint_granularity: full
  activations_checkpoint_method: uniform
  activations_checkpoint_num_layers: 1
  optim: {name: distributed_fused_adam}
"""
    reading = read(tmp_path, text, "model.yaml")
    layout = str(reading.job.layout)
    assert (
        layout == "pp2 dp2 tp4 seq zero1 1f1b:16 recompute:all stages:8-8 bf16"
    )
    assert reading.job.sequence == 4096


FAULTS = [
    ("train.sh", SCRIPT + " --pipeline-model-parallel-size 3", "--nnodes"),
    ("train.sh", SCRIPT + " --global-batch-size 65", "--global-batch-size"),
    ("train.sh", SCRIPT + " --fp16", "--bf16: does not go with --fp16"),
    ("train.sh", SCRIPT + " --overlap-param-gather", "needs --use-distributed-optimizer"),
    ("train.sh", SCRIPT + " --tensor-model-parallel-size 1 --sequence-parallel",
     "--sequence-parallel: needs --tensor-model-parallel-size above 1"),
    ("train.sh", SCRIPT + " --recompute-granularity full", "needs --recompute-method"),
    ("train.sh", SCRIPT + " --pipeline-model-parallel-size 4 --num-layers 30", "--num-layers: 30"),
    ("train.sh", SCRIPT + " --context-parallel-size 4 --seq-length 8190", "--seq-length: 8,190"),
    ("train.sh", SCRIPT + " --num-layers many", "--num-layers: is 'many'"),
    ("ds.json", '{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2,'
     ' "gradient_accumulation_steps": 3}', "train_batch_size: 256 is not"),
    ("ds.json", '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
     "needs zero_optimization.stage 3"),
    ("titan.toml", '[parallelism]\ndata_parallel_shard_degree = 3\ntensor_parallel_degree = 2',
     "data_parallel_shard_degree 3"),
    ("titan.toml", '[model]\nflavor = "8B"\n[training]\nlocal_batch_size = 3\n[parallelism]\n'
     'pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 2',
     "training.local_batch_size: 3 is no multiple"),
    ("titan.toml", '[parallelism]\nenable_async_tensor_parallel = true', "needs compile.enable"),
    ("a.yaml", "num_processes: 15\nnum_machines: 2\ndistributed_type: MULTI_GPU", "num_processes: 15"),
    ("a.yaml", "num_processes: 8\ndistributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}",
     "needs distributed_type FSDP"),
    ("n.yaml", "model: {seq_length: 4096, tensor_model_parallel_size: 1}\n"
     "dataset: {sequence_length: 8192}", "model.seq_length: 4,096"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "told"), FAULTS)
def test_a_contradiction_is_named_with_its_key(
    name: str, text: str, told: str, tmp_path: Path
) -> None:
    ranks = 0 if name == "train.sh" or "train_batch" in text else 8
    ranks = 0 if name == "a.yaml" else ranks
    reading = read(tmp_path, text, name, ranks=ranks)
    assert any(told in str(fault) for fault in reading.faults), reading.faults


VALUES = [
    0, -1, 1, 2, 3, 8, 64, 100000, 2**40, "auto", "x", "", "8", True, False, None, [], [1, 2], 1.5,
    float("nan"), float("inf"), "1e3", "Et*3|tL", "([0]*3+[1]*5)", "full", {},
]  # fmt: skip


@pytest.mark.parametrize("name", list(trainers()))
def test_no_value_of_an_option_ends_in_another_error(name: str) -> None:
    trainer = trainer_named(name)
    said: dict[str, list[Any]] = {
        key: [] for names in trainer.read.values() for key in names
    }
    rows = [
        x for g in trainer.words.values() for each in g.values() for x in each
    ]
    for row in rows:
        for key, value in row.items():
            said.setdefault(key, []).append(value)
    chance = random.Random(1)
    sizes = {
        "layers": 4,
        "hidden": 64,
        "heads": 4,
        "vocab": 100,
        "sequence": 128,
    }
    known = {
        trainer.key(q): size for q, size in sizes.items() if q in trainer.read
    }
    for number in range(300):
        some = chance.sample(sorted(said), chance.randint(1, len(said)))
        options = {key: chance.choice([*said[key], *VALUES]) for key in some}
        given = (
            Given(8, 16, 128, 2, Shape.load("tiny")) if number % 2 else Given()
        )
        try:
            reading = read_options(options | known, trainer, given)
        except LayoutError:
            continue
        assert Layout.parse(str(reading.job.layout)) == reading.job.layout


def test_sizes_below_one_are_faults(tmp_path: Path) -> None:
    text = "model: {tensor_model_parallel_size: 0, pipeline_model_parallel_size: -1}"
    reading = read(tmp_path, text, "n.yaml", ranks=8)
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        assert any(f"model.{key}" == fault.key for fault in reading.faults)


def test_what_is_left_to_a_script_is_no_fault(tmp_path: Path) -> None:
    text = """{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9}}"""
    given = {"ranks": 16, "batch": 64, "microbatches": 4}
    reading = read(tmp_path, text, "ds.json", model=Shape.load("1b"), **given)
    assert reading.faults == ()
    assert str(reading.job.layout) == "dp16 zero3 accum:4 bf16"
    left = "The training script decides train_batch_size, train_micro_batch_size_per_gpu,"
    assert reading.notes[0].startswith(left)
    assert "bf16 is assumed." in reading.notes
    text = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {gradient_accumulation_steps: 2, zero_stage: 2, offload_optimizer_device: none}
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
    reading = read(tmp_path, text, "a.yaml", batch=64)
    assert reading.faults == ()
    assert str(reading.job.layout) == "dp16 zero2 accum:2 bf16"


@pytest.mark.parametrize(
    ("name", "text", "recompute", "told"),
    [
        ("t.toml", "", "none", "activation_checkpoint.selective_ac_option 2: a layout has no word"),
        ("t.toml", '[activation_checkpoint]\nmode = "none"\n[model]\nconverters = []', "none", ""),
        ("t.toml", '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "1"', "all", ""),
        ("t.toml", '[training]\nmixed_precision_param = "float16"\n[activation_checkpoint]\nmode="full"',
         "all", "training.mixed_precision_param float16: a layout has no word"),
        ("n.yaml", "model: {tensor_model_parallel_size: 1}", "none", "The precision is the recipe's"),
    ],
)  # fmt: skip
def test_a_default_that_no_word_stands_for_is_noted(
    name: str, text: str, recompute: str, told: str, tmp_path: Path
) -> None:
    """torchtitan recomputes every second layer where its file does not say otherwise."""
    text = (
        f"[parallelism]\ntensor_parallel_degree = 1\n{text}"
        if "t." in name
        else text
    )
    reading = read(tmp_path, text, name, ranks=8, model=Shape.load("tiny"))
    assert reading.job.layout.recompute == recompute
    notes = " ".join(reading.notes)
    assert told in notes if told else not notes


def test_what_a_layout_has_no_word_for_is_noted(tmp_path: Path) -> None:
    text = SCRIPT + " --recompute-granularity full --recompute-method block"
    notes = read(tmp_path, text + " --mtp-num-layers 1", "train.sh").notes
    assert any("--recompute-method block" in note for note in notes)
    assert any("--mtp-num-layers" in note for note in notes)
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}"
    notes = read(tmp_path, text, "a.yaml", ranks=8).notes
    assert any("HYBRID_SHARD" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("x.json", "[1]", "x.json"), ("x.json", "{", "is not JSON"), ("x.toml", "a = ", "is not TOML"),
        ("x.yaml", "a: [", "is not plain YAML"), ("x.yaml", "!!python/object:os.x {}", "not plain YAML"),
        ("x.yaml", "just text", "no table"), ("x.sh", "echo hello", "no option by which"),
        ("x.toml", "[other]\na = 1", "no option by which"),
        ("x.yaml", "a: &a {b: 1}\n" + "".join(
            f"{'c' * n}: &c{n} {{x: *{'a' if n == 1 else f'c{n - 1}'},"
            f" y: *{'a' if n == 1 else f'c{n - 1}'}}}\n" for n in range(1, 30)), "more than"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_trainers_is_refused_in_a_sentence(
    name: str, text: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(LayoutError, match=told):
        read(tmp_path, text, name)
