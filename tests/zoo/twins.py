"""The zoo's models written again in PyTorch, as functions of (parameters by libwhale's names, inputs): the loss and the outputs."""

import math

import torch
import torch.nn.functional as F


def sub(p, prefix):
    """The parameters under a name scope."""
    return {name[len(prefix) + 1:]: value for name, value in p.items() if name.startswith(prefix + ".")}


def numbered(name, n):
    return [name if i == 0 else f"{name}_{i}" for i in range(n)]


def linear(p, x):
    return F.linear(x, p["weight"].T, p.get("bias"))


def layer_norm(p, x, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], p["weight"], p["bias"], eps)


def rms_norm(p, x):
    return F.rms_norm(x, x.shape[-1:], p["weight"], 1e-6)


def cross_entropy(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), **options)


def conv(p, x, **options):
    """Channels last; filters [o, k, k, c]."""
    return F.conv2d(x.permute(0, 3, 1, 2), p["weight"].permute(0, 3, 1, 2), p["bias"], **options).permute(0, 2, 3, 1)


def rotated(x):
    """Rotary positions of x [b, t, h, d]: pairs (i, i + d/2)."""
    t, d = x.shape[1], x.shape[-1]
    angle = torch.outer(torch.arange(t, dtype=x.dtype), 10000.0 ** (-torch.arange(0, d, 2, dtype=x.dtype) / d))
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attend(q, k, v, causal):
    """q [b, t, h, d], k and v [b, s, hk, d]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    return out.transpose(1, 2).flatten(2)


def attention(p, x, heads, kv_heads=0, causal=False, rotary=False):
    kv_heads = kv_heads or heads
    packed = linear(sub(p, "qkv"), x).unflatten(-1, (heads + 2 * kv_heads, -1))
    q, k, v = packed.split([heads, kv_heads, kv_heads], dim=2)
    if rotary:
        q, k = rotated(q), rotated(k)
    return linear(sub(p, "out"), attend(q, k, v, causal))


def mlp(p, x, activation):
    return linear(sub(p, "down"), activation(linear(sub(p, "up"), x)))


def gelu(x):
    return F.gelu(x, approximate="tanh")


def transformer_block(p, x, heads, activation):
    x = x + attention(sub(p, "attention"), layer_norm(sub(p, "norm1"), x), heads)
    return x + mlp(sub(p, "mlp"), layer_norm(sub(p, "norm2"), x), activation)


def vit(p, images, kinds, *, patch, heads, layers, **_):
    x = conv(sub(p, "patches"), images, stride=patch).flatten(1, 2)
    x = torch.cat([p["class_token"].expand(len(x), -1, -1), x], dim=1) + p["positions"]
    for name in numbered("block", layers):
        x = transformer_block(sub(p, name), x, heads, F.gelu)
    logits = linear(sub(p, "head"), layer_norm(sub(p, "norm"), x[:, 0]))
    return cross_entropy(logits, kinds), dict(logits=logits)


def convnext(p, images, counts, *, dims, depth, **_):
    x = images
    for i in range(len(dims)):
        stage = sub(p, f"stage{i}")
        x = layer_norm(sub(stage, "norm"), x) if i else x
        x = conv(sub(stage, "down"), x, stride=2)
        for j in range(depth):
            block = sub(stage, f"block{j}")
            y = conv(sub(block, "depthwise"), x, padding=2, groups=dims[i])
            x = x + block["scale"] * mlp(sub(block, "mlp"), layer_norm(sub(block, "norm"), y, 1e-6), F.gelu)
    logits = linear(sub(p, "head"), layer_norm(sub(p, "norm"), x.mean((1, 2))))
    return cross_entropy(logits, counts, label_smoothing=0.1), dict(logits=logits)


def llama(p, tokens, targets, *, heads, kv_heads, layers, **_):
    x = F.embedding(tokens, p["embedding.weight"])
    for name in numbered("block", layers):
        block = sub(p, name)
        x = x + attention(sub(block, "attention"), rms_norm(sub(block, "norm"), x), heads, kv_heads, causal=True, rotary=True)
        y = rms_norm(sub(block, "norm_1"), x)
        x = x + linear(sub(block, "down"), F.silu(linear(sub(block, "gate"), y)) * linear(sub(block, "up"), y))
    logits = linear(sub(p, "head"), rms_norm(sub(p, "norm"), x))
    return cross_entropy(logits, targets), dict(logits=logits)


def mixer(p, images, angles, *, patch, layers, **_):
    x = linear(sub(p, "patches"), F.unfold(images[:, None], patch, stride=patch).mT)
    for name in numbered("block", layers):
        block = sub(p, name)
        x = x + mlp(sub(block, "tokens"), layer_norm(sub(block, "norm1"), x).mT, gelu).mT
        x = x + mlp(sub(block, "channels"), layer_norm(sub(block, "norm2"), x), gelu)
    logits = linear(sub(p, "head"), layer_norm(sub(p, "norm"), x).mean(1))
    return cross_entropy(logits, angles), dict(logits=logits)


def unet(p, images, blots, *, levels, **_):
    def twice(x, name):
        for each in ("conv", "conv_1"):
            x = F.silu(conv(sub(sub(p, name), each), x, padding=1))
        return x

    x, skips = images, []
    for level in range(levels):
        x = twice(x, f"down{level}")
        skips.append(x)
        x = F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
    x = twice(x, "bottom")
    for level in reversed(range(levels)):
        up = sub(p, f"up{level}")
        x = F.conv_transpose2d(x.permute(0, 3, 1, 2), up["weight"].permute(0, 3, 1, 2), up["bias"], stride=2).permute(0, 2, 3, 1)
        x = twice(torch.cat([skips[level], x], dim=3), f"join{level}")
    logits = conv(sub(p, "head"), x)
    return F.binary_cross_entropy_with_logits(logits, blots), dict(logits=logits)


def lstm(p, past, next, *, hidden, layers, **_):
    x = past
    for name in numbered("lstm", layers):
        weight, bias = p[f"{name}.weight"].T, p[f"{name}.bias"].clone()
        bias = bias + torch.cat([torch.zeros(hidden), torch.ones(hidden), torch.zeros(2 * hidden)]).to(bias)  # of the forget gate
        order = torch.cat([torch.arange(0, 2 * hidden), torch.arange(3 * hidden, 4 * hidden), torch.arange(2 * hidden, 3 * hidden)])
        weight, bias = weight[order], bias[order]  # PyTorch's gates: input, forget, new, output
        d = x.shape[-1]
        start = torch.zeros(1, len(x), hidden, dtype=x.dtype)
        x = torch._VF.lstm(x, (start, start), [weight[:, :d].contiguous(), weight[:, d:].contiguous(), bias, torch.zeros_like(bias)],
                           True, 1, 0.0, True, False, True)[0]
    guess = linear(sub(p, "head"), x)
    return F.mse_loss(guess, next), dict(guess=guess)


def tied(p, word, so_far, answer, *, heads, **_):
    def look(q, x, context):
        query, key, value = (linear(sub(q, name), each).unflatten(-1, (heads, -1)) for name, each in
                             (("query", x), ("key", context), ("value", context)))
        return linear(sub(q, "out"), attend(query, key, value, False))

    read = transformer_block(sub(p, "reader"), F.embedding(word, p["table"]) + p["positions"], heads, gelu)
    x, writer = F.embedding(so_far, p["table"]) + p["positions"], sub(p, "writer")
    x = x + attention(sub(writer, "self"), layer_norm(sub(writer, "norm"), x), heads, causal=True)
    x = x + look(sub(writer, "look"), layer_norm(sub(writer, "norm_1"), x), read)
    x = x + mlp(sub(writer, "mlp"), layer_norm(sub(writer, "norm_2"), x), gelu)
    logits = layer_norm(sub(p, "norm"), x) @ p["table"].T
    return cross_entropy(logits, answer), dict(logits=logits)


def vae(p, images, noise, **_):
    seen = images.flatten(1)
    h = torch.tanh(linear(sub(p, "encoder"), seen))
    mean, log_variance = linear(sub(p, "mean"), h), linear(sub(p, "log_variance"), h)
    code = torch.distributions.Normal(mean, (log_variance / 2).exp())
    decode = lambda z: linear(sub(p, "pixels"), torch.tanh(linear(sub(p, "decoder"), z)))
    logits = decode(code.mean + code.stddev * noise)
    divergence = torch.distributions.kl_divergence(code, torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))).sum(1)
    loss = (F.binary_cross_entropy_with_logits(logits, seen, reduction="none").sum(1) + divergence).mean()
    return loss, dict(logits=logits, divergence=divergence, imagined=torch.sigmoid(decode(noise)).reshape(images.shape))


MODELS = dict(vit=vit, convnext=convnext, llama=llama, mixer=mixer, unet=unet, lstm=lstm, tied=tied, vae=vae)


def cosine(total, warmup, final):
    def rate(step):
        if step < warmup:
            return step / warmup
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup))))
    return rate


def inverse_sqrt(warmup):
    return lambda step: step / warmup if step < warmup else (warmup / step) ** 0.5


def adamw(decay, **options):
    """Weight decay of matrices only, as libwhale has it unless told otherwise."""
    return lambda ps: torch.optim.AdamW([dict(params=[x for x in ps if x.ndim > 1], weight_decay=decay),
                                         dict(params=[x for x in ps if x.ndim < 2], weight_decay=0.0)], **options)


# The optimizer, its learning rate over the updates, and the bound of the gradient's norm.
OPTIMIZERS = {
    "vit": (adamw(0.05, lr=2e-3), None, 0),
    "convnext": (adamw(0.05, lr=3e-3), cosine(300, 20, 0.0), 0),
    "llama": (adamw(0.1, lr=5e-3, betas=(0.9, 0.95)), cosine(200, 10, 0.1), 1.0),
    "mixer": (lambda ps: torch.optim.Adagrad(ps, lr=0.03), None, 0),
    "unet": (lambda ps: torch.optim.Adam(ps, lr=2e-3), None, 0),
    "lstm": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), None, 1.0),
    "tied": (lambda ps: torch.optim.Adam(ps, lr=5e-3, betas=(0.9, 0.98), eps=1e-9), inverse_sqrt(50), 0),
    "vae": (lambda ps: torch.optim.Adam(ps, lr=5e-3), None, 0),
}
