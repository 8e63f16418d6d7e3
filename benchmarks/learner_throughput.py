"""How much of the GPU's matrix rate the learner turns into training, and what the rest goes to. One GPU, minutes.

    PYTHONPATH=.:protos python -m benchmarks.learner_throughput --results FOLDER

Each configuration of the engine is a process of its own; what can be compared inside one is. Model flops per token are
6 N, where N are the parameters that take part in products: those of the layers for every token, the output layer's for
every token that is trained on; attention adds 6 · Σ length² · heads · head size · layers over the rows, causal. With
checkpointing the layers' and the attention's forward pass is done again: 8 N in place of 6 N.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import results

PROCESSES = {
    "main": 130.0,
    "hooks in every module": 45.0,
    "gradient bucket and stream": 45.0,
    "four times larger reductions": 45.0,
}
"""Configuration → seconds it may take."""
UPDATE_TOKENS = 65_536
WARM_UP_STEPS = 4
MICRO_BATCH_TOKENS = 8192
ROWS = (
    "prompt uniform on 64 … 512 tokens; answer log-normal, median 512, sigma 0.8, cut to 16 … 4096; "
    "answers are trained on, prompts are not; seed 0"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder for learner-throughput.json")
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--steps", type=int, default=4, help="measured Steps of each variant")
    parser.add_argument("--only", action="append", help="of the processes only these")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return _inside(arguments)
    parameters = {
        "shape": arguments.shape,
        "micro_batch_tokens": MICRO_BATCH_TOKENS,
        "update_tokens": UPDATE_TOKENS,
        "warm_up_steps": WARM_UP_STEPS,
        "steps": arguments.steps,
        "rows": ROWS,
    }
    result = results.begin("learner-throughput", parameters)
    result.samples["variants"] = []
    for name, seconds in PROCESSES.items():
        if arguments.only and name not in arguments.only:
            continue
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", "benchmarks.learner_throughput", "--inside", name]
        command += ["--results", str(arguments.results), "--shape", arguments.shape, "--steps", str(arguments.steps)]
        begin = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                _follow(process, seconds, result)
            finally:
                process.kill()
        print(f"   {time.monotonic() - begin:.0f} s", flush=True)
    path = arguments.results / "learner-throughput.json"
    results.write(result, path)  # whatever becomes of the sums
    _summarise(result)
    print(results.write(result, path))
    _print_table(result)
    return 0


def _follow(process: subprocess.Popen[str], seconds: float, result: results.Result) -> None:
    """Takes the lines of JSON that the process prints; others are shown. Ends it when its time is over."""
    import threading

    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                result.samples.setdefault(found.pop("kind"), []).append(found)
                print("  ", line[:300].rstrip(), flush=True)
            else:
                print("  |", line.rstrip(), flush=True)
        process.wait()
        if process.returncode:
            result.samples.setdefault("failures", []).append({"process ended with": process.returncode})
    finally:
        timer.cancel()


def _summarise(result: results.Result) -> None:
    rates = [sample["tflops_median"] for sample in result.samples.get("matrix", [])]
    if not rates:
        return
    for variant in result.samples["variants"]:
        seconds = statistics.median(variant["step_seconds"])
        variant["tokens_per_s"] = round(variant["tokens"] / seconds)
        for name in ("6N", "8N"):
            variant[f"share_of_matrix_rate_{name}"] = round(variant[f"tflop_{name}"] / seconds / rates[0], 4)
    by_name = {variant["name"]: variant for variant in result.samples["variants"]}
    result.summary = {"matrix_tflops": rates[0]}
    for name in ("base", "checkpointing"):
        if name in by_name:
            kept = ("tokens_per_s", "share_of_matrix_rate_6N", "share_of_matrix_rate_8N", "peak_gib")
            result.summary[name] = {key: by_name[name][key] for key in kept}


def _print_table(result: results.Result) -> None:
    print(json.dumps(result.summary, indent=1))
    for variant in result.samples["variants"]:
        print(
            f"{variant['name']:34} {variant.get('tokens_per_s', 0):8} tokens/s"
            f"  6N {variant.get('share_of_matrix_rate_6N')}  8N {variant.get('share_of_matrix_rate_8N')}"
            f"  {variant['peak_gib']} GiB  steps {[round(s, 3) for s in variant['step_seconds']]}"
        )
    for kind in ("head", "profile", "parity", "failures"):
        for sample in result.samples.get(kind, []):
            print(kind, json.dumps(sample))


# Inside a process: everything below needs torch.


def _say(kind: str, **found: Any) -> None:
    print(json.dumps({"kind": kind, **found}), flush=True)


@contextmanager
def _tried(name: str) -> Iterator[None]:
    """What fails is said and does not take the rest with it."""
    try:
        yield
    except Exception as error:
        _say("failures", name=name, error=f"{type(error).__name__}: {error}"[:500])
        traceback.print_exc()


def _inside(arguments: argparse.Namespace) -> int:
    from benchmarks import learner_engine
    from services.learner import zero_engine

    device = learner_engine.join()
    if arguments.inside == "hooks in every module":
        zero_engine._layers = lambda policy: []
    elif arguments.inside == "four times larger reductions":
        zero_engine.REDUCE_BUCKET_ELEMENTS *= 4
    elif arguments.inside == "gradient bucket and stream":
        usual = zero_engine.zero_config

        def with_bucket(*given: Any) -> dict[str, Any]:
            config = usual(*given)
            config["zero_optimization"] |= {"contiguous_gradients": True, "overlap_comm": True}
            return config

        zero_engine.zero_config = with_bucket
    if arguments.inside == "main":
        with _tried("matrix"):
            _say("matrix", **_matrix_rate(device))
    budget = 64 if arguments.shape == "tiny" else MICRO_BATCH_TOKENS
    rank = learner_engine.make_rank(arguments.shape, device, checkpointing=False, micro_batch_tokens=budget)
    _say("start", seconds_to_load=rank.seconds_to_load, seconds_to_start=rank.seconds_to_start)
    bench = _Bench(rank, arguments.steps)
    name = "base" if arguments.inside == "main" else arguments.inside
    with _tried(name):
        bench.measure(name, None if name == "base" else 2)
    if arguments.inside == "main":
        bench.compare()
    return 0


def _matrix_rate(device: Any, size: int = 8192, count: int = 60) -> dict[str, Any]:
    """Of bfloat16 products of random matrices, one by one."""
    import torch

    if device.type == "cpu":
        size, count = 512, 5
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(count):
        seconds.append(_timed(lambda: torch.mm(a, b), device))
    rates = [2 * size**3 / s / 1e12 for s in seconds[count // 6 :]]
    return {
        "size": size,
        "tflops_median": round(statistics.median(rates), 3),
        "tflops_best": round(max(rates), 3),
        "tflops_worst": round(min(rates), 3),
        "count": len(rates),
    }


def _timed(work: Callable[[], Any], device: Any) -> float:
    """Seconds of the work, on the device."""
    import torch

    if device.type == "cpu":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    work()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1e3


class _Bench:
    def __init__(self, rank: Any, steps: int) -> None:
        from benchmarks import learner_engine

        self.rank = rank
        self.steps = steps
        self.device = rank.device
        self.vocabulary = rank.policy.model.config.vocab_size
        self.budget = rank.runner.token_budget
        tokens = UPDATE_TOKENS * self.budget // MICRO_BATCH_TOKENS
        self.batch = learner_engine.make_batch(tokens, self.budget, self.vocabulary)
        self.step_id = 0

    def step(self, batch: Any = None) -> float:
        """One Step with one Update, as the trainer does it; its seconds."""
        import torch

        from benchmarks import learner_engine

        self.step_id += 1
        batch = batch or self.batch
        header = learner_engine.make_header(self.step_id, batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        result = self.rank.runner.run(header, batch, learner_engine.silent)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        assert not result.updates[0].skipped and result.updates[0].tokens == header.updates[0].token_count
        return seconds

    def measure(self, name: str, steps: int | None = None) -> None:
        import torch

        on_gpu = self.device.type == "cuda"
        for _ in range(WARM_UP_STEPS):
            self.step()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = [self.step() for _ in range(steps or self.steps)]
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        _say("variants", name=name, step_seconds=seconds, peak_gib=round(peak, 1), **self.flops())

    def flops(self) -> dict[str, float]:
        """Of one Step."""
        model = self.rank.policy.model
        layers = sum(p.ds_numel for n, p in model.named_parameters() if ".layers." in n and len(p.ds_shape) > 1)
        config = model.config
        head = config.vocab_size * config.hidden_size
        lengths = [len(row.token_ids) for row in self.batch]
        tokens, trained = sum(lengths), sum(sum(row.loss_mask) for row in self.batch)
        attention = sum(n * n for n in lengths) * config.hidden_size * config.num_hidden_layers
        return {
            "tokens": tokens,
            "trained_tokens": trained,
            "parameters_layers": layers,
            "parameters_head": head,
            "tflop_6N": (6 * layers * tokens + 6 * head * trained + 6 * attention) / 1e12,
            "tflop_8N": (8 * layers * tokens + 6 * head * trained + 8 * attention) / 1e12,
        }

    def compare(self) -> None:
        """What can be changed under a running engine: each against the base, and put back."""
        with _tried("profile"):
            self.profile("profile")
        with _tried("parity"):
            _say("parity", **self.parity())
        self.compare_heads()
        with _tried("checkpointing"), self.checkpointing():
            self.measure("checkpointing")
            self.profile("profile with checkpointing")
        for name, changed in (
            ("head by torch's operations", self.head_by_torch),
            ("layers not fused", self.layers_not_fused),
            ("optimizer by foreach", self.optimizer_by_foreach),
            ("padded, torch's own attention", self.padded),
        ):
            with _tried(name), changed():
                self.measure(name, 2)

    def compare_heads(self) -> None:
        from services.learner import logprob_head

        for logits in (1 << 27, 1 << 28, 1 << 29, 1 << 30):
            with _tried("head"), _set(logprob_head, "KERNEL_CHUNK_LOGITS", logits):
                _say("head", chunk_logits=logits, milliseconds=self.head_milliseconds())
        with _tried("head by torch's operations"), self.head_by_torch():
            _say("head", by="torch's operations", milliseconds=self.head_milliseconds())

    @contextmanager
    def head_by_torch(self) -> Iterator[None]:
        from services.learner import logprob_head

        with _set(logprob_head, "_kernels", lambda tensor: None), _set(logprob_head, "CHUNK_LOGITS", 1 << 28):
            yield

    @contextmanager
    def layers_not_fused(self) -> Iterator[None]:
        from services.learner.fused_layers import _Gated, _Norm

        modules = [m for m in self.rank.policy.modules() if isinstance(m.__dict__.get("forward"), _Gated | _Norm)]
        fused = [module.__dict__.pop("forward") for module in modules]
        try:
            yield
        finally:
            for module, forward in zip(modules, fused, strict=True):
                module.forward = forward

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        model = self.rank.policy.model
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()
            model.eval()

    @contextmanager
    def optimizer_by_foreach(self) -> Iterator[None]:
        groups = self.rank.engine.optimizer.optimizer.param_groups
        for group in groups:
            group["fused"], group["foreach"] = False, True
        try:
            yield
        finally:
            for group in groups:
                group["fused"], group["foreach"] = True, None

    @contextmanager
    def padded(self) -> Iterator[None]:
        from services.learner.batching import Layout

        model = self.rank.policy.model
        attention = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        self.rank.runner.layout = Layout.PADDED
        try:
            yield
        finally:
            model.set_attn_implementation(attention)
            self.rank.runner.layout = self.rank.layout

    def head_milliseconds(self) -> dict[str, float]:
        """Of the head alone, forward and backward, on as many tokens as a micro-batch has."""
        import torch

        from services.learner.logprob_head import LogprobHead

        config = self.rank.policy.model.config
        tokens = self.budget
        hidden = torch.randn(tokens, config.hidden_size, device=self.device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(config.vocab_size, config.hidden_size, device=self.device, dtype=torch.bfloat16) * 0.02
        targets = torch.randint(0, config.vocab_size, (tokens,), device=self.device)
        head = LogprobHead(torch.nn.Parameter(weight))
        found: dict[str, list[float]] = {"forward": [], "backward": []}
        slopes = torch.randn(tokens, device=self.device)
        for _ in range(6):
            kept: list[Any] = []
            forward = partial(_append, kept, head, hidden, targets)
            found["forward"].append(_timed(forward, self.device))
            found["backward"].append(_timed(partial(kept[0].backward, slopes), self.device))
        return {name: round(1e3 * statistics.median(seconds[2:]), 2) for name, seconds in found.items()}

    def parity(self) -> dict[str, Any]:
        """Rows in one line against the same rows alone, and against the model's own forward with plain attention."""
        import torch

        from services.learner.batching import Layout, Row, plan_micro_batches
        from services.learner.packing import pack

        rank, model = self.rank, self.rank.policy.model
        some = sorted(self.batch, key=lambda row: len(row.token_ids))[:: max(1, len(self.batch) // 8)][:8]
        rows = [Row(list(row.token_ids), list(range(1, len(row.token_ids)))) for row in some]
        layout = Layout.ONE_LINE if rank.layout is Layout.ONE_LINE else Layout.PADDED

        def computed(members: list[Row]) -> list[Any]:
            plan = plan_micro_batches(members, ranks=1, token_budget=self.budget, layout=layout)[0]
            found: dict[int, Any] = {}
            for micro_batch in plan:
                packed = pack(micro_batch, members, layout, self.device)
                logprobs, _ = rank.engine(packed, 1.0)
                found.update(zip(packed.rows, logprobs.split(packed.counts), strict=True))
            return [found[number] for number in range(len(members))]

        with torch.no_grad():
            packed = computed(rows)
            alone = [computed([row])[0] for row in rows]
            attention = model.config._attn_implementation
            model.set_attn_implementation("sdpa")
            own = []
            for row in rows:
                ids = torch.tensor([row.token_ids], device=self.device)
                logits = rank.policy.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
                own.append(torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None]).squeeze(-1))
            model.set_attn_implementation(attention)
        return {
            "rows": len(rows),
            "lengths": [len(row.token_ids) for row in rows],
            "packed_minus_alone": _difference(packed, alone),
            "packed_minus_own_forward": _difference(packed, own),
            "spread_of_logprobs": round(torch.cat(alone).std().item(), 4),
        }

    def profile(self, kind: str) -> None:
        """Where the time of one Update of two micro-batches goes, by kind of kernel; ms."""
        import torch
        from torch.profiler import ProfilerActivity

        if self.device.type != "cuda":
            return
        count = total = 0
        while total < 2 * self.budget - 512 and count < len(self.batch):
            total += len(self.batch[count].token_ids)
            count += 1
        batch = self.batch[:count]
        self.step(batch)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            seconds = self.step(batch)
        on_gpu = torch.autograd.DeviceType.CUDA
        kernels = [
            e for e in recorded.events() if e.device_type == on_gpu and not getattr(e, "is_user_annotation", False)
        ]
        kinds: dict[str, float] = {}
        names: dict[str, float] = {}
        for event in kernels:
            duration = event.time_range.elapsed_us() / 1e3
            of = next((k for k, pattern in KINDS.items() if re.search(pattern, event.name, re.I)), "elementwise")
            kinds[of] = kinds.get(of, 0.0) + duration
            names[event.name[:90]] = names.get(event.name[:90], 0.0) + duration
        busy = _covered([(e.time_range.start, e.time_range.end) for e in kernels]) / 1e3
        top = sorted(names.items(), key=lambda item: -item[1])[:25]
        _say(
            "profile",
            name=kind,
            tokens=total,
            kernels=len(kernels),
            wall_ms=round(1e3 * seconds, 1),
            busy_ms=round(busy, 1),
            idle_ms=round(1e3 * seconds - busy, 1),
            by_kind_ms={name: round(value, 1) for name, value in sorted(kinds.items(), key=lambda item: -item[1])},
            top_ms={name: round(value, 2) for name, value in top},
        )


KINDS = {
    "matrix products": r"gemm|cutlass|nvjet|xmma|cublas|sm90_|splitk",
    "attention": r"flash|fmha|attention",
    "head (without its products)": r"^_statistics|^_slopes",
    "gated activation": r"^_forward|^_backward",
    "norms": r"rms_norm|layer_norm|RowwiseMoments|GammaBeta|cuComputeGrad|LayerNorm",
    "optimizer": r"adam|multi_tensor|FusedOptimizer",
    "copies": r"memcpy|memset|copy",
    "nccl": r"nccl",
    "sums and norms of gradients": r"reduce|norm",
}
"""Kind → names of kernels; the first that fits. What fits none is elementwise."""


def _append(kept: list[Any], head: Any, hidden: Any, targets: Any) -> None:
    kept.append(head(hidden, targets, 1.0)[0])


def _difference(found: list[Any], expected: list[Any]) -> dict[str, float]:
    import torch

    each = torch.cat([(a - b).abs() for a, b in zip(found, expected, strict=True)])
    return {"mean": round(each.mean().item(), 6), "max": round(each.max().item(), 6)}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@contextmanager
def _set(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


if __name__ == "__main__":
    sys.exit(main())
