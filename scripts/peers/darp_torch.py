"""DARP in plain torch: training steps from given weights and batches, or actions from given histories.

The neighbour cache is one index tensor, a batch's features are gathered and joined at once, the network is a stack of
Linear, LayerNorm and ReLU on all of them, its outputs are averaged over the neighbours, AdamW follows a clip of the
gradient. Acting searches all expert rows, scores the candidates along the history and keeps the best of them.
"""

import math

import numpy as np
import torch
from _serve import serve, threads

torch.set_num_threads(threads())


def _network(inputs):
    """The per-neighbour network with the given weights."""
    layers = []
    for i in range(int(inputs["layers"])):
        n_in, n_out = inputs[f"w{i}"].shape
        linear = torch.nn.Linear(n_in, n_out)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(inputs[f"w{i}"].T.copy()))
            linear.bias.copy_(torch.from_numpy(inputs[f"b{i}"]))
        layers.append(linear)
        if f"scale{i}" in inputs:
            norm = torch.nn.LayerNorm(n_out, eps=1e-5)
            with torch.no_grad():
                norm.weight.copy_(torch.from_numpy(inputs[f"scale{i}"]))
                norm.bias.copy_(torch.from_numpy(inputs[f"bias{i}"]))
            layers += [norm, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def _features(z, u, near, zq):
    states = z[near]
    return torch.cat([states, u[near], (states - zq[:, None]) / math.sqrt(2)], dim=-1)


def _training(inputs):
    z, u, cache = (torch.from_numpy(inputs[name]) for name in ("z", "u", "cache"))
    cache = cache.long()
    network = _network(inputs)
    parameters = list(network.parameters())
    optimiser = torch.optim.AdamW(
        parameters, lr=float(inputs["learning_rate"]), weight_decay=float(inputs["weight_decay"]), fused=True
    )
    clip = float(inputs["clip_norm"])
    # the last batch of an epoch is short: its padding is left out here
    batches = [torch.from_numpy(rows[rows >= 0]).long() for rows in inputs["batches"]]

    def run():
        losses = []
        for rows in batches:
            out = network(_features(z, u, cache[rows], z[rows])).mean(dim=1)
            loss = torch.nn.functional.mse_loss(out, u[rows])
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimiser.step()
            losses.append(loss.detach())
        return {"loss": torch.stack(losses).numpy()}

    return run


def _acting(inputs):
    z, u, place, mean, std, act_mean, act_std = (
        torch.from_numpy(inputs[name]) for name in ("z", "u", "place", "mean", "std", "act_mean", "act_std")
    )
    network = _network(inputs).eval()
    k, keep = int(inputs["k"]), int(inputs["keep"])
    hist, valid = inputs["hist"], inputs["valid"]
    back = torch.arange(hist.shape[2])
    weight = (back + 1).to(torch.float32) ** float(inputs["decay"])

    def act(hist, valid):
        past = ((torch.from_numpy(hist) - mean) / std).flip(1)
        zq = past[:, 0]
        # a row at distance 0 is left out, so the distance has to be summed from differences
        distance = torch.cdist(zq, z, compute_mode="donot_use_mm_for_euclid_dist")
        distance = distance.masked_fill(distance == 0, torch.inf)
        rows = distance.topk(k, dim=1, largest=False, sorted=False).indices
        terms = torch.minimum(place[rows] + 1, torch.from_numpy(valid)[:, None])
        steps = torch.linalg.vector_norm(z[(rows[..., None] - back).clamp(min=0)] - past[:, None], dim=-1)
        score = torch.where(back < terms[..., None], weight * steps, 0.0).sum(-1)
        near = rows.gather(1, score.topk(keep, dim=1, largest=False, sorted=False).indices)
        return network(_features(z, u, near, zq)).mean(dim=1) * act_std + act_mean

    @torch.inference_mode()
    def run():
        return {"action": np.stack([act(h, v).numpy() for h, v in zip(hist, valid)])}

    return run


def prepare(size, inputs):
    return _training(inputs) if "batches" in inputs else _acting(inputs)


if __name__ == "__main__":
    serve(prepare, packages=("torch",))
