"""Scripts that ask for CUDA have it over CPU memory, or as the CPU by another name; which of the
two is chosen and said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distsim.script_capture.cuda import build_extension, emulation
from distsim.script_capture.cuda.build_extension import ExtensionUnavailable
from distsim.script_capture.cuda.script_scan import find_cuda_use

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
TRAINS = """
import sys
sys.path.insert(0, sys.argv[1])
import distsim.script_capture.cuda.emulation as dc
layer = dc.select_emulation({"PATH": "/nowhere", "XDG_CACHE_HOME": sys.argv[2]})
layer.install(2)
import torch
assert (layer.name, torch.cuda.device_count(), torch.cuda.is_available()) == (dc.CPU_ALIASED, 2, True), layer
torch.cuda.set_device("cuda:1")
device = torch.device("cuda", 1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to(device).cuda().to(1)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
one = torch.ones(2, 4)
for x in (torch.ones(2, 4, device="cuda"), one.cuda(non_blocking=True), one.to("cuda:0"), one.to(0), one.pin_memory()):
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.cuda.stream(torch.cuda.Stream()):
        loss = model(x).float().sum()
    loss.backward()
    torch.cuda.synchronize()
optimizer.step()
assert isinstance(device, torch.device) and model[0].weight.device == device and torch.cuda.memory_allocated() == 0
event = torch.cuda.Event(enable_timing=True)
event.record()
assert dc.as_cpu(x) is x and dc.from_cpu(x) is x
generator = torch.Generator(device="cuda").manual_seed(1)
assert torch.randn(2, device="cuda", generator=generator).shape == (2,) and isinstance(generator, torch.Generator)
assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
torch.accelerator.set_device_index(0)
torch.accelerator.synchronize(torch.accelerator.current_stream().device_index)
assert torch.accelerator.device_count() == 2 and torch.accelerator.current_device_index() == torch.cuda.current_device() == 0
assert torch.ones(1).to(torch.accelerator.current_accelerator()).device == torch.device("cuda")
import io
file = io.BytesIO()
torch.save({"x": one}, file)
file.seek(0)
assert torch.load(file, map_location="cuda:1")["x"].shape == one.shape
print("trained", layer.reason)
"""


#: A torch with CUDA on a machine with GPUs, as far as it counts them: the driver by what it may
#: show, NVML by itself.
HIDES = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
seen = []
torch._C._cuda_getDeviceCount = lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]) or 0
torch.cuda._device_count_nvml = lambda: 8
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
assert torch.cuda.device_count() == 8
from distsim.script_capture.cuda.hide_gpus import hide_gpus
hide_gpus()
assert (seen, os.environ["CUDA_VISIBLE_DEVICES"]) == ([""], "0,1"), seen
assert torch.cuda.device_count() == 0
"""


def test_gpus_of_the_machine_are_hidden_from_a_captured_script() -> None:
    """torch counts while the driver shows none; what the script reads of its environment is as it
    was.
    """
    done = in_a_process("-c", HIDES, str(ROOT))

    assert done.returncode == 0, done.stderr


#: The command line of `distsim capture`, with the device in place before torch is there.
CAPTURE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import distsim.script_capture.cuda.emulation as dc
layer = dc.select_emulation()
assert layer.name == dc.CPU_BACKED, layer
layer.install(2)
from distsim.cli.process import main
sys.argv[1:1] = ["capture"]
main()
"""
SCRIPT = """
import os, torch, torch.nn as nn, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)))
model = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[rank])
assert next(model.parameters()).device == torch.device("cuda", rank)
optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cuda")
torch.manual_seed(rank)
for _ in range(2):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(torch.randn(4, 8, device="cuda")).float().pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
x = torch.full((3,), float(rank), device="cuda")
dist.all_reduce(x)
assert x.tolist() == [1, 1, 1] and x.is_cuda
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    dist.all_reduce(x)
    done = side.record_event()
torch.cuda.current_stream().wait_event(done)
from torch.distributed.fsdp import fully_shard
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
for part in (*net, net):
    fully_shard(part)
net(torch.ones(4, 8, device="cuda")).sum().backward()
torch.cuda.synchronize()
dist.destroy_process_group()
"""


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=900, check=False
    )


def builds() -> bool:
    """Is there what a build needs? (Without a compiler the other layer is right.)"""
    try:
        build_extension.find_compiler(os.environ)
    except ExtensionUnavailable:
        return False
    return True


@pytest.mark.skipif(not builds(), reason="no compiler")
def test_a_device_over_cpu_memory_behaves_like_a_gpu() -> None:
    """62 checks (tests/support/cuda_checks.py): devices that must not be mixed, views, out=,
    convolutions, recurrent cells, attention, autocast and scaler, optimizers, checkpoints,
    generators, streams, memory, pinning, forked processes, and that each patch has its reason."""
    done = in_a_process(str(ROOT / "tests" / "support" / "cuda_checks.py"))

    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["layer"], found["failed"]) == (emulation.CPU_BACKED, {})
    assert found["held"] >= 62


@pytest.mark.skipif(not builds(), reason="no compiler")
def test_a_ddp_script_for_nccl_is_captured_with_cuda_tensors(tmp_path: Path) -> None:
    """DDP with SyncBatchNorm, autocast, GradScaler and a fused optimizer: its calls are issued by
    the device's autograd thread. Calls on another stream, of the script and of FSDP, name it.
    """
    script, scenario = tmp_path / "train.py", tmp_path / "train.yaml"
    script.write_text(SCRIPT, encoding="utf-8")

    arguments = ["--nproc", "2", "-o", str(scenario), "--", "python", str(script)]
    done = in_a_process("-c", CAPTURE, str(ROOT), *arguments)

    assert "verdict ok" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "all ranks finished" in done.stdout
    steps = scenario.read_text(encoding="utf-8").splitlines()
    on_streams = [step for step in steps if '"on": ' in step and "wait_stream" not in step]
    named = {step.partition(":")[0].strip(" -"): step for step in on_streams}
    assert '"on": side}' in named["all_reduce"]
    assert '"on": all_gather_stream}' in named["all_gather_into_tensor"]
    assert '"on": reduce_scatter_stream}' in named["reduce_scatter_tensor"]
    assert any("wait_stream: side" in step for step in steps)
    assert sum("- synchronize  #" in step for step in steps) == 1
    # The host waits for values: GradScaler's scale, the loss, x.tolist().
    assert sum("- synchronize: current" in step for step in steps) > 1


@pytest.mark.skipif(not builds(), reason="no compiler")
def test_a_loss_of_torch_causes_no_warning(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    lines = (
        "import torch, torch.distributed as dist",
        'dist.init_process_group("nccl")',
        'x = torch.randn(4, 1, device="cuda", requires_grad=True)',
        "for function in (torch.nn.functional.mse_loss, torch.nn.functional.smooth_l1_loss):",
        "    loss = function(x, torch.zeros_like(x))",
        "    loss.backward()",
        "    assert loss.shape == () and x.grad.shape == x.shape",
    )
    script.write_text("\n".join(lines), encoding="utf-8")

    done = in_a_process("-c", CAPTURE, str(ROOT), "--nproc", "1", "--", "python", str(script))

    assert "verdict ok" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "Warning" not in done.stderr


MIXED = """\
import torch, torch.distributed as dist
dist.init_process_group("cpu:gloo,cuda:nccl")
torch.cuda.set_device(dist.get_rank())
slow, fast = torch.ones(8), torch.ones(8, device="cuda")
dist.all_reduce(fast)
work = dist.all_reduce(fast, async_op=True)
dist.all_reduce(slow)
work.wait()
dist.send(slow, 1 - dist.get_rank())
dist.recv(slow, 1 - dist.get_rank())
"""


@pytest.mark.skipif(not builds(), reason="no compiler")
def test_calls_of_a_group_with_two_backends_follow_the_backend_of_their_tensors(
    tmp_path: Path,
) -> None:
    """Two sends first hang on gloo. What is on the GPU before is nccl's: a wait for it keeps no
    host. As annotations of an Actions run.
    """
    script = tmp_path / "train.py"
    script.write_text(MIXED, encoding="utf-8")

    done = in_a_process(
        "-c", CAPTURE, str(ROOT), "--nproc", "2", "--format", "github", "--", "python", str(script)
    )

    errors = [line for line in done.stdout.splitlines() if line.startswith("::error")]
    assert len(errors) == 1, done.stdout + done.stderr[-2000:]
    assert f"file={script},line=9" in errors[0]
    assert "DS301" in errors[0]


SAVES = """\
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
assert not torch.cuda.is_initialized()
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
model = torch.nn.Linear(8, 8, device="meta")
fully_shard(model)
assert torch.cuda.is_initialized() and torch.cuda.current_device() == rank
model.to_empty(device=f"cuda:{rank}")
optimizer = torch.optim.AdamW(model.parameters())
saved = None
for step in range(2):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    if saved is not None:
        saved.result()
    saved = dcp.async_save({"model": model.state_dict()}, checkpoint_id=sys.argv[1] + str(step))
saved.result()
try:
    dcp.async_save({}, process_group=dist.new_group(backend="nccl"), checkpoint_id=sys.argv[1])
except AssertionError as refused:
    assert "A CPU backend must be enabled" in str(refused)
else:
    raise SystemExit("torch takes no such group")
"""


@pytest.mark.skipif(not builds(), reason="no compiler")
def test_a_mesh_selects_the_gpu_of_a_rank_and_a_checkpoint_is_saved_during_steps(
    tmp_path: Path,
) -> None:
    """Until a device is used torch.cuda is not started, so FSDP2's mesh takes LOCAL_RANK; a thread
    saves over gloo.
    """
    script = tmp_path / "train.py"
    script.write_text(SAVES, encoding="utf-8")

    done = in_a_process(
        "-c",
        CAPTURE,
        str(ROOT),
        "--nproc",
        "2",
        "--",
        "python",
        str(script),
        str(tmp_path / "saved"),
    )

    assert "verdict ok" in done.stdout, done.stdout + done.stderr[-2000:]
    assert (tmp_path / "saved1" / ".metadata").exists()


def test_a_script_needs_a_gpu_if_it_or_a_file_that_it_imports_mentions_cuda(tmp_path: Path) -> None:
    script, other = tmp_path / "train.py", tmp_path / "model.py"
    for line in ("device = 'cuda'", "device = torch.accelerator.current_accelerator()"):
        other.write_text(f"\n{line}\n", encoding="utf-8")
        script.write_text("import torch\nx = 'barracuda'\n", encoding="utf-8")
        assert not find_cuda_use(script).needed, "the script does not import model.py"

        script.write_text("import torch\nimport model\n", encoding="utf-8")
        assert find_cuda_use(script).needed
    assert find_cuda_use(script).reason == "model.py, line 2, mentions torch.accelerator"
    assert not find_cuda_use(tmp_path / "nowhere" / "train.py").needed


def test_a_script_needs_a_gpu_if_an_installed_package_that_it_imports_asks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, library = tmp_path / "train.py", tmp_path / "site" / "trainlib"
    library.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(library.parent))
    script.write_text("from trainlib import Trainer\n", encoding="utf-8")

    (library / "__init__.py").write_text("# runs on cuda\n", encoding="utf-8")
    assert not find_cuda_use(script).needed, "a comment asks for nothing"
    (library / "loop.py").write_text("torch.cuda.is_available()\n", encoding="utf-8")
    assert find_cuda_use(script) == (True, "train.py imports trainlib, which asks torch for GPUs")


def test_a_script_uses_cuda_if_a_neighbouring_package_that_it_imports_mentions_it(
    tmp_path: Path,
) -> None:
    script, module = tmp_path / "train.py", tmp_path / "engine" / "loops" / "step.py"
    module.parent.mkdir(parents=True)
    module.write_text("model.cuda()\n", encoding="utf-8")
    script.write_text("import torch\n", encoding="utf-8")

    assert not find_cuda_use(script).needed, "nothing imports it"
    script.write_text("def main():\n    from engine.loops import step\n", encoding="utf-8")
    assert find_cuda_use(script).needed


@pytest.mark.slow
def test_a_timer_thread_of_a_library_does_not_hide_a_hang(tmp_path: Path) -> None:
    """Kineto has a thread of its own while a profiler runs, which Python does not know."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "with torch.profiler.profile():\n    dist.recv(torch.ones(1), 1 - dist.get_rank())\n",
        encoding="utf-8",
    )

    done = in_a_process(
        "-m", "distsim", "capture", "--nproc", "2", "--timeout", "120s", "--", "python", str(script)
    )

    assert "verdict deadlock" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "still" not in done.stderr


def test_a_script_that_needs_a_missing_gpu_gets_a_hint_at_the_cuda_option(
    tmp_path: Path,
) -> None:
    """The text of the script does not mention CUDA, as when an installed library asks for a
    device.
    """
    script = tmp_path / "train.py"
    script.write_text("import torch\ngetattr(torch, 'cu' + 'da').set_device(0)\n", encoding="utf-8")

    done = in_a_process(
        "-m", "distsim", "capture", "--nproc", "2", "--no-cuda", "--", "python", str(script)
    )

    assert "the option emulates one per rank" in " ".join(done.stdout.split()), (
        done.stdout + done.stderr[-2000:]
    )


@pytest.mark.skipif(not builds(), reason="no compiler")
def test_a_missing_device_is_refused_in_the_words_of_torch_without_blaming_a_group(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('nccl', device_id=torch.device('cuda', 7))\n",
        encoding="utf-8",
    )

    done = in_a_process("-c", CAPTURE, str(ROOT), "--nproc", "2", "--", "python", str(script))

    assert "error DS112: ValueError: device_id cuda:7 is out of range" in done.stdout, (
        done.stdout + done.stderr[-2000:]
    )
    assert "list each member once" not in done.stdout


TRITON = """
import os, sys
from distsim.script_capture.cuda.triton_interpreter import enable_interpreter
enable_interpreter()
import triton.runtime.driver as there
assert there.loaded and os.environ["TRITON_INTERPRET"] == "1"
from distsim.script_capture.cuda.fake_driver import device_properties
assert there.driver.active.utils.get_device_properties(0)["multiprocessor_count"] == device_properties().multi_processor_count
assert there.driver.active.get_benchmarker()(print, quantiles=(0.5, 0.2)) == [0.0, 0.0]
try:
    there.driver.active.utils.load_binary()
except RuntimeError as refused:
    assert "interpreted" in str(refused)
    print("driven")
"""


def test_triton_interprets_its_kernels_and_has_a_driver_without_a_gpu(tmp_path: Path) -> None:
    """A package of that name in place of Triton, which torch brings with its CUDA wheel alone."""
    package = tmp_path / "triton" / "runtime"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py"):
        file.touch()
    (package / "driver.py").write_text(
        "class Config:\n    def set_active(self, driver):\n        self.active = driver\n\n\ndriver, loaded = Config(), True\n",
        encoding="utf-8",
    )

    code = f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{TRITON}"
    done = in_a_process("-c", code)

    assert done.stdout == "driven\n", done.stderr[-2000:]


KERNEL = """
import torch, torch.distributed as dist, triton, triton.language as tl

@triton.autotune(configs=[triton.Config({"B": 32}), triton.Config({"B": 64})], key=["n"])
@triton.jit
def twice(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

dist.init_process_group("nccl")
x = torch.arange(100.0, device="cuda")
o = torch.empty_like(x)
twice[lambda meta: (triton.cdiv(100, meta["B"]),)](x, o, 100)
assert o.is_cuda and torch.equal(o, 2 * x)
dist.all_reduce(o)
"""


def test_a_triton_kernel_computes_its_values_on_cuda_tensors(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "train.py"
    script.write_text(KERNEL, encoding="utf-8")

    done = in_a_process("-m", "distsim", "capture", "--nproc", "2", "--", "python", str(script))

    assert "verdict ok" in done.stdout, done.stdout + done.stderr[-2000:]


def test_without_a_compiler_cuda_is_an_alias_of_cpu_and_a_training_script_runs(
    tmp_path: Path,
) -> None:
    done = in_a_process("-c", TRAINS, str(ROOT), str(tmp_path))

    assert done.stdout.startswith("trained no C++ compiler"), done.stderr[-2000:]
    assert list(tmp_path.iterdir()) == []


def torch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without headers in place of the installed one."""
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text("__version__ = '9.9.0+test'\n", encoding="utf-8")
    spec: Any = type("Spec", (), {"origin": str(folder / "__init__.py")})
    monkeypatch.setattr(build_extension.importlib.util, "find_spec", lambda name: spec)


def test_cuda_kernels_of_a_wheel_are_registered_before_they_are_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the linker: what is linked to is loaded first. Nothing is linked that a wheel lacks."""
    commands: list[list[str]] = []
    monkeypatch.setattr(build_extension, "_run", lambda command, failure: commands.append(command))
    for has_cuda in (True, False):
        build_extension._compile_extension(
            "g++",
            build_extension.TorchInstallation(tmp_path, "9.9.0", has_cuda),
            tmp_path / "device.so",
        )

    assert ["-ltorch_cuda" in command for command in commands[::2]] == [True, False]
    assert "-Wl,--no-as-needed" in commands[0][: commands[0].index("-ltorch_cuda")]


def test_a_torch_without_headers_falls_back_to_the_other_layer_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_folder(tmp_path, monkeypatch)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(emulation, "_loaded", [])

    layer = emulation.select_emulation({"XDG_CACHE_HOME": str(tmp_path)})

    assert (layer.name, layer.reason) == (
        emulation.CPU_ALIASED,
        "torch 9.9.0+test is installed without its headers",
    )


def test_an_already_imported_torch_keeps_the_devices_it_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(emulation, "_loaded", [])
    monkeypatch.setitem(sys.modules, "torch", sys)

    assert emulation.select_emulation().reason.startswith("torch was imported earlier")


def test_a_failing_compiler_leaves_nothing_behind_and_its_first_error_is_reported(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "g++"
    broken.write_text(
        "#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n", encoding="utf-8"
    )
    broken.chmod(0o755)
    cache = tmp_path / "cache"

    with pytest.raises(
        ExtensionUnavailable, match=r"could not build the extension: .*no such thing"
    ):
        build_extension._compile_extension(
            str(broken), build_extension.find_torch(), cache / "device.so"
        )
    assert list(cache.iterdir()) == []


def test_an_extension_that_was_built_but_does_not_load_is_not_kept(tmp_path: Path) -> None:
    """A "compiler" that writes something that is no library."""
    broken = tmp_path / "g++"
    broken.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho nonsense > "$2"\n', encoding="utf-8"
    )
    broken.chmod(0o755)
    cache = tmp_path / "cache"

    with pytest.raises(ExtensionUnavailable, match="the extension does not run"):
        build_extension._compile_extension(
            str(broken), build_extension.find_torch(), cache / "device.so"
        )
    assert list(cache.iterdir()) == []


def test_a_built_extension_is_reused_from_the_cache(tmp_path: Path) -> None:
    """With no compiler at all, once it is there; another version of torch or of the source has a
    name of its own.
    """
    torch = build_extension.find_torch()
    key = build_extension._cache_key(build_extension.SOURCE.read_bytes(), torch)
    kept = (
        build_extension.cache_folder({"XDG_CACHE_HOME": str(tmp_path)})
        / f"device-{torch.version.replace('+', '_')}-{key}.so"
    )
    kept.parent.mkdir()
    kept.touch()

    assert (
        build_extension.extension_library({"XDG_CACHE_HOME": str(tmp_path), "PATH": "/nowhere"})
        == kept
    )
    assert (
        build_extension._cache_key(b"other", torch)
        != key
        != build_extension._cache_key(
            build_extension.SOURCE.read_bytes(), torch._replace(version="other")
        )
    )


def test_a_configured_but_missing_compiler_is_reported() -> None:
    with pytest.raises(ExtensionUnavailable, match="CXX is nothing-of-this-name"):
        build_extension.find_compiler({"CXX": "nothing-of-this-name"})


def test_the_cache_is_where_the_user_configured_it() -> None:
    assert build_extension.cache_folder({"XDG_CACHE_HOME": "/some/where"}) == Path(
        "/some/where/distsim"
    )
    assert (
        build_extension.cache_folder({"XDG_CACHE_HOME": "relative"})
        == Path.home() / ".cache" / "distsim"
    )
