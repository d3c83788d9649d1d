# SPDX-License-Identifier: Apache-2.0
"""Statements of tensor operations: templates, filled with values and axes as they are drawn.

In a template {a} is a value, {b} one of the same shape if there is one, {c} any value; {d} and {e}
are axes of {a}, {n} is the extent of {d}, {k} a number below it, {h} about half of it, {s} the
shape. A template whose text fails on the tensors is drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_VIEWS = """
{a}.transpose({d}, {e}) | {a}.movedim({d}, {e}) | {a}.flatten() | {a}.flatten({d}) |
{a}.reshape(-1) | {a}.reshape({n}, -1) | {a}.view(-1, {n}) | {a}.unsqueeze({d}) | {a}.squeeze({d}) |
{a}.contiguous() | {a}.unsqueeze(0).expand(3, *{s}) | {a}[..., :{h}] | {a}[..., {k}:] | {a}[{k}:] |
{a}[::2] | {a}[..., ::2] | {a}[..., -1] | {a}.narrow({d}, {k}, 1) | {a}.select({d}, {k}) |
{a}.flip({d}) | {a}.roll({k}, {d}) | {a}.unfold({d}, 2, 1) |
{a}.permute(*reversed(range({a}.dim()))) | {a}.mT | {a}[None] | {a}.diagonal(0, {d}, {e}) |
{a}.tile(2) | {a}.repeat_interleave(2, {d}) | {a}.detach() | F.pad({a}, (1, 2)) |
F.pad({a}, (-1, 1), value=0.5) | F.pad({a}, (1, 1), mode='reflect') | {a}.chunk(2, {d})[0] |
{a}.chunk(2, {d})[-1] | {a}.split({h}, {d})[-1] | {a}.unbind({d})[{k}] | {a}.tril() | {a}.triu(1) |
{a}.unflatten({d}, (-1, 1)) | {a}.broadcast_to(2, *{s}) | {a}.as_strided({s}, {a}.stride()) |
{a}.swapaxes({d}, {e}).contiguous().view(-1)
"""
_JOINS = """
torch.cat([{a}, {b}], {d}) | torch.cat([{a}, {a}, {b}], {d}) | torch.stack([{a}, {b}], {d}) |
torch.cat([{a}, {c}], {d}) | torch.hstack([{a}, {b}]) | torch.where({a} > {b}, {a}, {b} * 2) |
torch.where({a} > 0, {a}, 0.0) | torch.where({a} > {c}, {a}, {c}) | {a} + {b} | {a} - {b} |
{a} * {b} | {a} * {c} | {a} + {c} | {a} / ({c}.abs() + 1) | torch.maximum({a}, {b}) |
torch.minimum({a}, {c}) | torch.addcmul({a}, {b}, {b}, value=0.5) | torch.lerp({a}, {b}, 0.25) |
torch.hypot({a}, {b} + 3) | torch.atan2({a}, {b}.abs() + 1) | {a} @ {a}.mT | {a} @ {c} |
{a}.mT @ {a} | {a} @ {c}.mT | torch.einsum('...i,...j->...ij', {a}, {b}) |
torch.einsum('...i,...i->...', {a}, {b}) | torch.einsum('i...,j...->ij', {a}, {b}) |
torch.outer({a}.flatten()[:9], {c}.flatten()[:5]) | F.cosine_similarity({a}, {b} + 1, dim={d}) |
torch.cdist({a} , {b} + 1) | torch.baddbmm({a} @ {a}.mT, {a}, {a}.mT) |
F.scaled_dot_product_attention({a}, {b}, {b}) |
F.scaled_dot_product_attention({a}, {a}, {b}, is_causal=True) |
F.scaled_dot_product_attention({a}, {a}, {a}, scale=0.5)
"""
_REDUCTIONS = """
{a}.sum({d}) | {a}.sum({d}, keepdim=True) | {a}.mean({d}) | {a}.mean({d}, keepdim=True) |
{a}.sum() | {a}.mean() | {a}.amax({d}) | {a}.amin({d}, keepdim=True) | {a}.var({d}) |
{a}.std({d}, correction=0) | torch.logsumexp({a}, {d}) | {a}.prod({d}) | {a}.norm() |
{a}.norm(dim={d}) | {a}.norm(1, dim={d}) | {a}.cumsum({d}) | {a}.tanh().cumprod({d}) |
{a}.max({d})[0] | {a}.min({d}, keepdim=True)[0] | {a}.sort({d})[0] |
{a}.sort({d}, descending=True)[0] | {a}.topk({h}, {d})[0] | {a}.median({d})[0] |
{a}.square().sum(({d}, {e})) | torch.var_mean({a}, {d})[1] | F.normalize({a} + 2, dim={d}) |
{a} - {a}.mean({d}, keepdim=True) | {a} / ({a}.abs().amax({d}, keepdim=True) + 1) |
torch.linalg.vector_norm({a}, dim={d}) | {a}.kthvalue(1, {d})[0] | {a}.logcumsumexp({d})
"""
_INDEXING = """
{a}.index_select({d}, ids % {n}) | {a}[ids % {a}.shape[0]] |
{a}.gather({d}, torch.zeros_like({a}, dtype=torch.long)) | {a}.gather({d}, {a}.argsort({d})) |
torch.take_along_dim({a}, {a}.argmax({d}, keepdim=True), {d}) | {a}.masked_fill({a} > 0.5, -1.0) |
{a}.masked_fill({a} < {a}.mean(), 0.0) | F.one_hot(ids, 4).to({a}.dtype) |
{a}[..., ids % {a}.shape[-1]] |
torch.zeros_like({a}).scatter({d}, torch.zeros_like({a}, dtype=torch.long), {a}) |
torch.zeros_like({a}).scatter_add({d}, {a}.argsort({d}), {a}) |
{a}.index_add(0, ids % {a}.shape[0], {a}[ids % {a}.shape[0]]) |
{a}.index_fill({d}, ids % {n}, 0.25) | F.embedding(ids % {a}.shape[0], {a}) |
torch.nan_to_num({a})
"""
_MATH = """
{a}.relu() | F.gelu({a}) | F.gelu({a}, approximate='tanh') | F.silu({a}) | {a}.tanh() |
{a}.sigmoid() | F.leaky_relu({a}, 0.1) | F.elu({a}) | F.selu({a}) | F.softplus({a}) |
F.hardswish({a}) | F.mish({a}) | F.softmax({a}, {d}) | F.log_softmax({a}, {d}) | F.relu6({a}) |
F.hardtanh({a}) | F.logsigmoid({a}) | F.glu({a}, {d}) | F.hardsigmoid({a}) | F.softsign({a}) |
F.tanhshrink({a}) | F.softmin({a}, {d}) | F.hardshrink({a}) | F.softshrink({a}) | F.celu({a}, 0.5) |
F.threshold({a}, 0.1, 0.2) | {a}.abs() | ({a}.abs() + 0.1).sqrt() | {a}.tanh().exp() |
({a}.abs() + 1).log() | {a}.sin() | {a}.cos() | {a}.square() | {a} ** 3 | ({a}.abs() + 0.5) ** 1.5 |
{a}.clamp(-1, 1) | {a}.clamp(min=0.1) | -{a} | 2 - {a} | 1 / ({a}.abs() + 1) |
({a}.abs() + 0.2).rsqrt() | {a}.erf() | {a}.atan() | {a}.expm1().clamp(max=5) |
({a}.abs()).log1p() | {a}.sign() * {a} | {a}.tanh().asin().sin() | {a}.sinh().clamp(-9, 9) |
{a} * 0.5 | {a}.double().to({a}.dtype) | {a}.float().to({a}.dtype) | {a}.fmod(1.5) |
{a}.remainder(0.7) | {a} % 2 | {a}.round() + {a} | {a}.floor() * {a} | {a}.frac() |
{a}.trunc() - {a} | {a}.sigmoid().logit() | F.dropout({a}, 0.0) |
F.dropout({a}, 0.5, training=False) | F.layer_norm({a}, {s}[-1:]) | F.rms_norm({a}, {s}[-1:]) |
torch.logaddexp({a}, {a} * 2) | torch.sinc({a}) | {a}.heaviside(torch.ones_like({a})) * {a} |
torch.nn.functional.rrelu({a}, training=False) | {a}.xlogy({a}.abs() + 1) |
{a}.copysign(torch.ones_like({a}))
"""
_POOLING = """
F.max_pool1d({a}, 2) | F.max_pool2d({a}, 2) | F.avg_pool1d({a}, 2) | F.avg_pool2d({a}, 2, 1) |
F.max_pool2d({a}, 3, 2, 1) | F.avg_pool2d({a}, 3, 2, 1, count_include_pad=False) |
F.adaptive_avg_pool1d({a}, 2) | F.adaptive_avg_pool2d({a}, 1) | F.adaptive_max_pool2d({a}, 2) |
F.interpolate({a}, scale_factor=2) | F.interpolate({a}, scale_factor=2, mode='bilinear') |
F.interpolate({a}, size=5, mode='linear') | F.pixel_shuffle({a}, 2) | F.lp_pool1d({a} + 3, 2, 2) |
F.unfold({a}, 2)
"""
_IN_PLACE = """
$ = {a}.clone(); $.mul_({c}) | $ = {a}.clone(); $.add_(1.5).relu_() | $ = {a} * 1; $[..., 0] = 0.5 |
$ = {a} * 1; $[..., :1] += {b}[..., :1] | $ = {a}.clone(); $.clamp_(-0.5, 0.5) |
$ = {a}.clone(); $.transpose({d}, {e}).mul_(2) | $ = {a} * 2; $.masked_fill_({a} > 0, 0.1) |
$ = torch.zeros_like({a}); $.copy_({b}) | $ = {a}.clone(); $[0] = {b}[0] |
$ = {a} + 0; $.sub_({b}).div_(2) | $ = {a}.clone(); $.view(-1)[::2] *= 3 |
$ = torch.empty_like({a}); $.zero_(); $ += {b} | $ = {a}.clone(); $[..., 1:] = $[..., :-1].clone() |
$ = {a}.clone(); $.index_fill_(0, ids % {a}.shape[0], 1.0) |
$ = {a} * 1; $.select({d}, {k}).fill_(0.3) | $ = {a}.clone(); $.exp_().clamp_(max=4) |
$ = {a}.clone(); $.t_()
"""


def _templates(text: str) -> list[str]:
    return [one.strip() for one in text.replace("\n", " ").split(" | ") if one.strip(" |")]


def _maker(text: str) -> Callable[[Any], Any]:
    templates = [one.strip(" |") for one in _templates(text)]

    def draw(w: Any) -> Any:
        template, a = w.rng.choice(templates), w.pick()
        shape = list(w.values[a].shape)
        axes = range(-len(shape), len(shape)) if shape else [0]
        d, e = w.rng.choice(list(axes)), w.rng.choice(list(axes))
        extent = shape[d] if shape else 1
        filled = template.format(
            a=a, b=w.pick(like=w.values[a]), c=w.pick(), d=d, e=e, n=extent,
            k=w.rng.randrange(extent or 1), h=max(extent // 2, 1), s=shape,
        )  # fmt: skip
        return (), tuple(filled.split("; ")) if "$ =" in filled else (f"$ = {filled}",)

    return draw


EXPRESSIONS: dict[str, Callable[[Any], Any]] = {
    "view": _maker(_VIEWS),
    "join": _maker(_JOINS),
    "reduction": _maker(_REDUCTIONS),
    "indexing": _maker(_INDEXING),
    "math": _maker(_MATH),
    "pooling": _maker(_POOLING),
    "in place": _maker(_IN_PLACE),
}
