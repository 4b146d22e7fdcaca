# ruff: noqa: B015, B018, B905, E402, E741, F841, N806, N812, PT017, PT018, RUF059
"""Checks that the emulated CUDA device behaves as a real one: `python -m tests.support.cuda_checks`
prints the checks that fail and the number of those that pass.

It is a separate program because the device must exist before torch is imported.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.simplefilter("ignore")

import distsim.script_capture.cuda.emulation as dc

layer = dc.select_emulation()
layer.install(2)

import torch
import torch.nn as nn
import torch.nn.functional as F

d = "cuda"


def same(fn, *shapes, tol=1e-5, grad=True, **kw):
    torch.manual_seed(0)
    a = [torch.randn(*s) for s in shapes]
    c = [x.clone().cuda() for x in a]
    for x in (*a, *c):
        x.requires_grad_(grad)
    r, q = fn(*a), fn(*c)
    assert q.device.type == "cuda"
    assert torch.allclose(r, q.cpu(), atol=tol), (r - q.cpu()).abs().max()
    if grad:
        r.sum().backward()
        q.sum().backward()
        for x, y in zip(a, c):
            assert y.grad.device.type == "cuda" and torch.allclose(x.grad, y.grad.cpu(), atol=tol)


def modsame(m, *shapes, tol=1e-4, pick=lambda o: o):
    torch.manual_seed(0)
    mc = copy.deepcopy(m).cuda()
    a = [torch.randn(*s) for s in shapes]
    r, q = pick(m(*a)), pick(mc(*[x.cuda() for x in a]))
    assert q.is_cuda
    assert torch.allclose(r, q.cpu(), atol=tol), (r - q.cpu()).abs().max()
    r.pow(2).sum().backward()
    q.pow(2).sum().backward()
    for x, y in zip(m.parameters(), mc.parameters()):
        assert y.grad.is_cuda and torch.allclose(x.grad, y.grad.cpu(), atol=tol), (
            (x.grad - y.grad.cpu()).abs().max()
        )


def basics():
    x = torch.ones(3, device=d)
    assert (
        x.is_cuda
        and str(x.device) == "cuda:0"
        and repr(x) == "tensor([1., 1., 1.], device='cuda:0')"
    )
    assert (
        torch.tensor([1, 2], device="cuda:1").device.index == 1
        and x.tolist() == [1, 1, 1]
        and torch.zeros(2).cuda(1).get_device() == 1
    )


def mixing():
    try:
        torch.ones(3, device=d) + torch.ones(3)
    except RuntimeError as e:
        assert "same device" in str(e)
    else:
        raise AssertionError
    try:
        torch.ones(3, device="cuda:1") + torch.ones(3, device="cuda:0")
    except RuntimeError as e:
        assert "same device" in str(e)
    else:
        raise AssertionError
    try:
        nn.Linear(3, 3).cuda()(torch.ones(2, 3))
    except RuntimeError as e:
        assert "same device" in str(e)
    else:
        raise AssertionError
    assert (torch.ones(3, device=d) + torch.tensor(2.0)).is_cuda
    assert torch.ones(3, device=d)[torch.tensor([0, 1])].is_cuda


def mm():
    same(lambda x, y: (x @ y).relu(), (3, 4), (4, 5))


def views():
    x = torch.arange(12.0, device=d).view(3, 4)
    x[1].mul_(2)
    x.t()[0].add_(1)
    y = torch.arange(12.0).view(3, 4)
    y[1].mul_(2)
    y.t()[0].add_(1)
    assert torch.equal(x.cpu(), y)
    assert (
        x[1]._base is not None
        or x[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    )


def outs():
    o = torch.empty(0, device=d)
    torch.add(torch.ones(3, device=d), 1, out=o)
    assert o.tolist() == [2, 2, 2]
    v = torch.zeros(4, device=d)
    torch.mul(torch.ones(2, device=d), 3, out=v[:2])
    assert v.tolist() == [3, 3, 0, 0]


def conv():
    modsame(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.ConvTranspose2d(8, 4, 2),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
        ),
        (2, 3, 8, 8),
    )


def conv1d3d():
    modsame(nn.Conv1d(3, 4, 3, dilation=2), (2, 3, 9))
    modsame(nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4))


def lstm():
    modsame(nn.LSTM(4, 8, 2, batch_first=True), (2, 3, 4), pick=lambda o: o[0])


def gru():
    modsame(nn.GRU(4, 8, bidirectional=True), (3, 2, 4), pick=lambda o: o[0])


def rnn():
    modsame(nn.RNN(4, 8), (3, 2, 4), pick=lambda o: o[0])


def cells():
    modsame(nn.LSTMCell(4, 8), (2, 4), pick=lambda o: o[1])
    modsame(nn.GRUCell(4, 8), (2, 4))


def lnorm():
    modsame(
        nn.Sequential(
            nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4), nn.GroupNorm(2, 4), nn.Softmax(-1)
        ),
        (2, 8),
    )
    modsame(nn.RMSNorm(8), (2, 8))


def outer():
    same(lambda a, b: torch.bmm(a, b), (2, 3, 1), (2, 1, 4))


def sdpa():
    same(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (2, 3, 5, 4),
        (2, 3, 5, 4),
        (2, 3, 5, 4),
    )


def sdpamask():
    same(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool, device=q.device).tril()
        ),
        (2, 3, 5, 4),
        (2, 3, 5, 4),
        (2, 3, 5, 4),
    )


def sdpagqa():
    same(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (2, 4, 5, 4),
        (2, 2, 5, 4),
        (2, 2, 5, 4),
    )


def sdpabf():
    q = torch.randn(1, 2, 4, 8, device=d, dtype=torch.bfloat16, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert q.grad.is_cuda


def mha():
    modsame(
        nn.MultiheadAttention(8, 2, batch_first=True),
        (2, 3, 8),
        (2, 3, 8),
        (2, 3, 8),
        pick=lambda o: o[0],
    )


def transf():
    modsame(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8))


def transfeval():
    m = (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2
        )
        .cuda()
        .eval()
    )
    with torch.no_grad():
        assert m(torch.randn(2, 3, 8, device=d)).is_cuda


def embed():
    e = nn.Embedding(10, 4).cuda()
    e(torch.tensor([1, 2, 1], device=d)).sum().backward()
    assert e.weight.grad.is_cuda


def ce():
    x = torch.randn(4, 5, device=d, requires_grad=True)
    F.cross_entropy(x, torch.tensor([0, 1, 2, 4], device=d)).backward()
    assert x.grad.is_cuda


def drop():
    x = torch.ones(100, device=d)
    y = F.dropout(x, 0.5)
    assert 10 < (y == 0).sum().item() < 90


def amp():
    m = nn.Linear(4, 4).cuda()
    s = torch.amp.GradScaler("cuda")
    o = torch.optim.SGD(m.parameters(), 0.1)
    for dt in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dt):
            y = m(torch.ones(2, 4, device=d))
            assert y.dtype == dt
        s.scale(y.float().sum()).backward()
        s.unscale_(o)
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        s.step(o)
        s.update()
        o.zero_grad()
    with torch.cuda.amp.autocast():
        assert m(torch.ones(2, 4, device=d)).dtype == torch.float16


def clip():
    p = [torch.ones(3, device=d, requires_grad=True)]
    p[0].grad = torch.ones(3, device=d) * 9
    n = nn.utils.clip_grad_norm_(p, 1.0, foreach=True)
    assert n.is_cuda and abs(p[0].grad.norm().item() - 1) < 1e-4


def fake():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        m = nn.Linear(4, 4, device=d)
        y = m(torch.ones(2, 4, device=d))
        y.sum().backward()
        assert m.weight.grad.device.type == "cuda"


def storage():
    x = torch.arange(4.0, device=d)
    s = x.untyped_storage()
    s.resize_(0)
    assert s.size() == 0
    s.resize_(16)
    x.fill_(2)
    assert x.sum().item() == 8 and s.device.type == "cuda"


def saveload():
    with tempfile.TemporaryDirectory() as t:
        m = nn.Linear(3, 3).cuda()
        torch.save(m.state_dict(), t + "/a")
        q = torch.load(t + "/a")
        assert q["weight"].is_cuda and torch.equal(q["weight"], m.weight)
        q = torch.load(t + "/a", map_location="cpu")
        assert not q["weight"].is_cuda
        torch.load(t + "/a", map_location="cuda:1")["weight"].get_device() == 1
        torch.save(torch.ones(2), t + "/b")
        assert torch.load(t + "/b", map_location="cuda").is_cuda


def deep():
    m = nn.Linear(3, 3).cuda()
    c = copy.deepcopy(m)
    c.weight.data.zero_()
    assert m.weight.abs().sum() > 0 and c.weight.is_cuda


def ckpt():
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(3, device=d, requires_grad=True)
    checkpoint(lambda y: (F.dropout(y, 0.1) * 2).relu(), x, use_reentrant=False).sum().backward()
    checkpoint(lambda y: y.relu(), x, use_reentrant=True).sum().backward()
    assert x.grad.is_cuda


def rng():
    torch.manual_seed(5)
    a = torch.rand(3, device=d)
    s = torch.cuda.get_rng_state()
    b_ = torch.rand(3, device=d)
    torch.cuda.set_rng_state(s)
    assert torch.equal(torch.rand(3, device=d), b_)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3, device=d), a)
    g = torch.Generator(device="cuda").manual_seed(1)
    assert g.device.type == "cuda"
    x = torch.randn(3, device=d, generator=g)
    g.manual_seed(1)
    assert torch.equal(x, torch.randn(3, device=d, generator=g))
    torch.randperm(5, device=d)
    torch.cuda.manual_seed_all(3)
    with torch.random.fork_rng(devices=[0]):
        torch.rand(2, device=d)


def streams():
    s = torch.cuda.Stream()
    e = torch.cuda.Event(enable_timing=True)
    f = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(s):
        assert torch.cuda.current_stream() == s
        e.record()
        x = torch.ones(2, device=d)
        f.record(s)
    torch.cuda.current_stream().wait_stream(s)
    s.wait_event(e)
    x.record_stream(s)
    f.synchronize()
    assert f.query() and e.elapsed_time(f) >= 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.synchronize()
    s.synchronize()
    isinstance(s.cuda_stream, int)


def cudaq():
    assert (
        torch.cuda.is_available()
        and torch.cuda.device_count() == 2
        and torch.cuda.current_device() == 0
    )
    torch.cuda.set_device(1)
    assert torch.ones(1, device=d).get_device() == 1 and torch.cuda.current_device() == 1
    torch.cuda.set_device("cuda:0")
    with torch.cuda.device(1):
        assert torch.empty(1, device=d).get_device() == 1
    assert torch.cuda.current_device() == 0
    p = torch.cuda.get_device_properties(0)
    assert (
        p.total_memory > 1e9
        and torch.cuda.get_device_capability() == (8, 0)
        and torch.cuda.get_device_name()
    )
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.nccl.version()[0] == 2
    assert (
        torch.accelerator.current_accelerator().type == "cuda"
        and torch.accelerator.device_count() == 2
        and torch.backends.cuda.is_built()
    )
    torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.memory_summary()
    torch.cuda.ipc_collect()
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.init()
    torch.cuda.get_arch_list()
    torch.cuda.utilization()
    torch.accelerator.synchronize()
    torch.accelerator.set_device_index(0)
    try:
        torch.cuda.set_device(7)
    except RuntimeError:
        pass
    else:
        raise AssertionError


def memory():
    torch.cuda.reset_peak_memory_stats()
    a = torch.cuda.memory_allocated()
    x = torch.empty(1 << 20, device=d)
    y = x + 1
    assert torch.cuda.memory_allocated() - a == 8 << 20, torch.cuda.memory_allocated() - a
    del x, y
    assert torch.cuda.memory_allocated() == a
    assert torch.cuda.max_memory_allocated() >= a + (8 << 20)


def pin():
    x = torch.ones(4).pin_memory()
    assert x.is_pinned() and not torch.ones(3).is_pinned()
    assert x.cuda(non_blocking=True).is_cuda
    assert torch.empty(3, pin_memory=True).is_pinned()


def loader():
    from torch.utils.data import DataLoader, TensorDataset

    for (b_,) in DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, pin_memory=True):
        assert b_.is_pinned()


def alias():
    x = torch.arange(4.0, device=d)
    c = dc.as_cpu(x)
    assert not c.is_cuda
    c.add_(1)
    assert x.tolist() == [1, 2, 3, 4]
    y = dc.from_cpu(c)
    y.mul_(2)
    assert x.tolist() == [2, 4, 6, 8] and y.is_cuda
    v = dc.as_cpu(x[2:])
    v.zero_()
    assert x.tolist() == [2, 4, 0, 0]
    assert dc.as_cpu(x.requires_grad_()).requires_grad is False


def aot():
    f = torch.compile(lambda x: (x * 2).relu().sum(), backend="aot_eager")
    x = torch.ones(3, device=d, requires_grad=True)
    f(x).backward()
    assert x.grad.is_cuda


def compiled():
    """Inductor's kernels can't be built: the graph runs as it was traced."""
    f = torch.compile(lambda x: (x * 2).relu().sum(), mode="max-autotune")
    x = torch.ones(3, device=d, requires_grad=True)
    f(x).backward()
    assert x.grad.tolist() == [2, 2, 2]


def graphs():
    """Recording leaves values as they are; each replay computes anew."""
    x, y = torch.ones(2, device=d), torch.zeros(2, device=d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (x * 3).view(1, 2) + 1
        y += x
    assert y.tolist() == [0, 0]
    for value in (1, 2):
        x.fill_(value)
        graph.replay()
        assert total.tolist() == [[3 * value + 1, 3 * value + 1]]
    assert y.tolist() == [3, 3]


def indexing():
    x = torch.randn(5, 4, device=d)
    m = x > 0
    assert x[m].is_cuda
    x[m] = 0
    assert (x <= 0).all()
    assert x.nonzero().is_cuda
    i = torch.tensor([0, 2], device=d)
    x.index_add_(0, i, torch.ones(2, 4, device=d))
    x.scatter_(1, torch.zeros(5, 1, dtype=torch.long, device=d), 1.0)
    torch.where(m, x, 0.0)
    torch.topk(x, 2)
    torch.sort(x)
    torch.cat([x, x])
    torch.stack([x, x]).split(1)
    x.unique()
    torch.multinomial(torch.ones(3, device=d), 2)
    torch.bincount(i)


def tocpu():
    x = torch.ones(3, device=d, requires_grad=True)
    y = x.cpu()
    assert not y.is_cuda
    y.sum().backward()
    assert x.grad.is_cuda
    assert x.to("cuda:1").get_device() == 1
    x.detach().to(torch.float16)
    assert x.detach().cpu().numpy().sum() == 3
    torch.from_numpy(x.detach().cpu().numpy()).to(d, non_blocking=True)
    try:
        x.detach().numpy()
    except TypeError:
        pass
    else:
        raise AssertionError


def syncbn_kernels():
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4)
    m = nn.BatchNorm1d(3)
    y = m(x)
    mean, inv = torch.batch_norm_stats(x.cuda(), 1e-5)
    rm, rv = torch.zeros(3, device=d), torch.ones(3, device=d)
    h = [torch.batch_norm_stats(p.cuda(), 1e-5) for p in x.split([2, 4])]
    M, I = torch.batch_norm_gather_stats_with_counts(
        x.cuda(),
        torch.stack([a for a, _ in h]),
        torch.stack([b_ for _, b_ in h]),
        rm,
        rv,
        0.1,
        1e-5,
        torch.tensor([8.0, 16.0], device=d),
    )
    assert (
        torch.allclose(M, mean, atol=1e-5)
        and torch.allclose(I, inv, atol=1e-5)
        and torch.allclose(rv.cpu(), m.running_var, atol=1e-5)
    )
    assert torch.allclose(
        torch.batch_norm_elemt(x.cuda(), m.weight.cuda(), m.bias.cuda(), M, I, 1e-5).cpu(),
        y,
        atol=1e-5,
    )
    x2 = x.clone().requires_grad_()
    y2 = nn.functional.batch_norm(x2, None, None, m.weight, m.bias, True)
    g = torch.randn_like(y2)
    y2.backward(g)
    t, p, gw, gb = torch.batch_norm_backward_reduce(
        g.cuda(), x.cuda(), M, I, m.weight.cuda(), True, True, True
    )
    gx = torch.batch_norm_backward_elemt(
        g.cuda(),
        x.cuda(),
        M,
        I,
        m.weight.cuda(),
        t,
        p,
        torch.tensor([24], dtype=torch.int32, device=d),
    )
    assert torch.allclose(gx.cpu(), x2.grad, atol=1e-5) and torch.allclose(
        gw.cpu(), m.weight.grad, atol=1e-4
    )


def wider_products():
    a, b, x = (
        torch.randn(3, 4, dtype=torch.bfloat16),
        torch.randn(4, 5, dtype=torch.bfloat16),
        torch.randn(3, 5),
    )
    wanted = a.float() @ b.float()
    found = torch.mm(a.cuda(), b.cuda(), out_dtype=torch.float32)
    assert found.dtype == torch.float32 and torch.allclose(found.cpu(), wanted, atol=1e-5)
    out = torch.empty(3, 5, device=d)
    torch.addmm(x.cuda(), a.cuda(), b.cuda(), out_dtype=torch.float32, out=out, alpha=2)
    assert torch.allclose(out.cpu(), x + 2 * wanted, atol=1e-5)
    assert torch.bmm(a.cuda()[None], b.cuda()[None], out_dtype=torch.float32).shape == (1, 3, 5)
    for function in (torch.softmax, torch.log_softmax):
        for asked in (None, torch.float32):
            narrow = torch.randn(3, 5, dtype=torch.float16, device="cuda", requires_grad=True)
            wide = narrow.detach().cpu().float().requires_grad_()
            (function(narrow, -1, dtype=asked) * torch.arange(5.0, device="cuda")).sum().backward()
            (function(wide, -1) * torch.arange(5.0)).sum().backward()
            assert function(narrow, 0, dtype=asked).dtype == (asked or torch.float16)
            assert narrow.grad is not None
            assert wide.grad is not None
            torch.testing.assert_close(narrow.grad.cpu().float(), wide.grad, atol=1e-2, rtol=1e-2)


def inference():
    positions = torch.arange(8, device=d)
    with torch.inference_mode():
        x = torch.ones(3, device=d)
        assert (x * 2).sum().item() == 6
        view = positions[2:4]
        assert view.tolist() == [2, 3]
        assert not view.is_inference()  # a view of a normal tensor is a normal tensor
        assert x[1:].is_inference()


def params():
    m = nn.Linear(2, 2)
    w = m.weight
    m.to(d)
    assert m.weight.is_cuda
    m.half()
    m.cpu()
    m.to("meta").to_empty(device=d)
    assert m.weight.is_cuda


def complexes():
    x = torch.randn(4, device=d, dtype=torch.complex64)
    assert (x.conj() * x).real.is_cuda
    torch.fft.fft(x)
    torch.view_as_real(x)


def ints():
    torch.arange(5, device=d)
    torch.linspace(0, 1, 5, device=d)
    torch.eye(3, device=d)
    torch.full((2,), 3, device=d)
    torch.ones(2, device=d).bernoulli_(0.5)
    torch.empty(3, device=d).uniform_()
    torch.tril(torch.ones(3, 3, device=d))
    torch.ones(3, device=d).cumsum(0)
    torch.einsum("ij,jk->ik", torch.ones(2, 2, device=d), torch.ones(2, 2, device=d))
    torch.linalg.svd(torch.ones(2, 2, device=d))


def functorch():
    f = torch.func.vmap(torch.func.grad(lambda x: (x**2).sum()))
    assert f(torch.ones(3, 2, device=d)).is_cuda


def hooks():
    x = torch.ones(2, device=d, requires_grad=True)
    l = []
    x.register_hook(lambda g: l.append(g.device.type))
    x.register_post_accumulate_grad_hook(lambda p: l.append(p.grad.device.type))
    (x * 2).sum().backward()
    assert l == ["cuda", "cuda"]


def fsdpish():
    x = torch.empty(8, device=d)
    torch.split_with_sizes_copy(torch.arange(8.0, device=d), [4, 4], out=[x[:4], x[4:]])
    assert x.tolist() == list(range(8))
    torch._foreach_copy_([x[:2]], [torch.zeros(2, device=d)])
    torch.chunk(x, 2)
    o = torch.empty(2, 4, device=d)
    torch._chunk_cat([x.view(2, 4)], 0, 2, out=o.view(2, -1))
    x.set_(torch.ones(3, device=d))
    assert x.tolist() == [1, 1, 1]
    x.data = torch.zeros(2, device=d)
    assert x.shape == (2,)
    torch._foreach_norm([x, x])
    torch._foreach_mul_([x], 2.0)


def dlpack_share():
    x = torch.ones(2, device=d)
    y = x.detach()
    assert y.data_ptr() == x.data_ptr()
    assert x.element_size() == 4 and x.is_contiguous() and x.storage().device.type == "cuda"


def typ():
    assert torch.ones(1, device=d).type() == "torch.cuda.FloatTensor"


def defdev():
    with torch.device("cuda"):
        assert torch.ones(2).is_cuda and nn.Linear(2, 2).weight.is_cuda
    torch.set_default_device("cuda")
    assert torch.ones(1).is_cuda
    torch.set_default_device(None)


def isdev():
    x = torch.ones(1, device=d)
    assert x.device == torch.device("cuda", 0) and x.device.type == "cuda" and not x.is_cpu


def forward_ad():
    import torch.autograd.forward_ad as fa

    with fa.dual_level():
        assert fa.unpack_dual(
            fa.make_dual(torch.ones(2, device=d), torch.ones(2, device=d)) * 2
        ).tangent.tolist() == [2, 2]


def profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        torch.ones(2, device=d) + 1
    torch.cuda.nvtx


def accum():
    m = nn.Linear(3, 3).cuda()
    [m(torch.ones(2, 3, device=d)).sum().backward() for _ in range(3)]
    m.zero_grad()
    torch.autograd.grad(m(torch.ones(1, 3, device=d)).sum(), m.parameters())


def trains_as_on_the_cpu(optimizer: Any, **options: Any) -> None:
    torch.manual_seed(0)
    host = nn.Linear(4, 4)
    device = copy.deepcopy(host).cuda()
    for model, x in ((host, torch.ones(2, 4)), (device, torch.ones(2, 4, device=d))):
        stepper = optimizer(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            stepper.zero_grad()
            model(x).pow(2).sum().backward()
            stepper.step()
    assert torch.allclose(host.weight, device.weight.cpu(), atol=1e-5)


def optimizers() -> None:
    for cls, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
    ):
        trains_as_on_the_cpu(cls, **options)


def forked() -> None:
    """A process that was forked before any backward pass has the device too."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        torch.cuda.set_device(1)
        x = torch.ones(2, device=d, requires_grad=True)
        (x * 3).sum().backward()
        os.write(write, f"{x.grad}".encode())
        os._exit(0)
    os.close(write)
    text = os.read(read, 1000).decode()
    assert os.waitpid(pid, 0)[1] == 0
    assert text == "tensor([3., 3.], device='cuda:1')", text


def elsewhere() -> None:
    """What lies on another device than the current one stays there, through kernels of our own
    too.
    """
    x = torch.randn(2, 3, 5, 4, device="cuda:1", requires_grad=True)
    made = [
        x.softmax(-1),
        x.log_softmax(-1),
        torch._safe_softmax(x, -1),
        x.softmax(-1, dtype=torch.float64),
    ]
    made += [
        F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=p) for p in (0.0, 0.5)
    ]
    made += [nn.GRU(4, 4).to(x.device)(x[0])[0], nn.LSTMCell(4, 4).to(x.device)(x[0, 0])[0]]
    sum(m.float().sum() for m in made).backward()
    assert torch.cuda.current_device() == 0
    assert {m.device for m in (*made, x.grad)} == {torch.device("cuda:1")}


def patched() -> None:
    """Each name that was put in place is there, has a reason, and shares no function with another
    in the same place.
    """
    from distsim.script_capture.cuda import cpu_backed, fake_driver

    patches = [
        *fake_driver.common_patches(fake_driver.EmulatedDevice()),
        *cpu_backed.stream_event_patches(),
        *cpu_backed.storage_patches(),
        *cpu_backed.compile_patches(),
    ]
    assert all(len(p.reason) > 10 and hasattr(fake_driver.patch_owner(p), p.name) for p in patches)
    functions = [
        id(getattr(fake_driver.patch_owner(p), p.name))
        for p in patches
        if p.where == "torch._C" and callable(p.value) and not isinstance(p.value, type)
    ]
    assert len(set(functions)) == len(functions) > 30
    for name in dir(torch._C):
        if name.startswith("_cuda_") and name not in {"_cuda_CUDAAllocator"}:
            getattr(torch._C, name)


if __name__ == "__main__":
    names = [
        "forked",
        *(
            n
            for n, v in list(globals().items())
            if getattr(v, "__module__", "") == "__main__"
            and callable(v)
            and n not in {"same", "modsame", "trains_as_on_the_cpu", "forked"}
        ),
    ]
    failed = {}
    for name in sys.argv[1:] or names:
        try:
            globals()[name]()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:500]
    sys.stdout.write(
        json.dumps(
            {
                "layer": layer.name,
                "reason": layer.reason,
                "held": len(names) - len(failed),
                "failed": failed,
            }
        )
        + "\n"
    )
