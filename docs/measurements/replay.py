"""Caches replayed in plain Python, as one writes them down: the outer baseline of simulate.sh.

It is our own, from docs/cache-policies.md; BigMoeOnEdge's replay is not used. A trace is a list of tokens, each a list of layers,
each a list of experts. All experts have one size, so a budget is a number of slots, and each layer's experts of a token are a
batch: they are looked up in order, then the cache is cut back to its slots without them.
"""

from collections import OrderedDict


class Xorshift:
    """Marsaglia's xorshift64, as in crates/moe-analysis/benches/simulate.rs."""

    def __init__(self):
        self.state = 88_172_645_463_325_252

    def below(self, n):
        mask = (1 << 64) - 1
        self.state ^= self.state << 13 & mask
        self.state ^= self.state >> 7
        self.state ^= self.state << 17 & mask
        return self.state * n >> 64


def made_up(n_token, n_layer=48, n_expert=128, n_used=8):
    """The trace that the bench makes up, too."""
    random, last, tokens = Xorshift(), [[] for _ in range(n_layer)], []
    for _ in range(n_token):
        layers = []
        for layer in range(n_layer):
            chosen = []
            while len(chosen) < n_used:
                if random.below(3) == 0 and last[layer]:
                    expert = last[layer][random.below(n_used)]
                else:
                    rank = min(random.below(n_expert), random.below(n_expert))
                    expert = (rank * 37 + layer * 11) % n_expert
                if expert not in chosen:
                    chosen.append(expert)
            last[layer] = chosen
            layers.append(chosen)
        tokens.append(layers)
    return tokens


def batches(tokens):
    for layers in tokens:
        for layer, experts in enumerate(layers):
            yield [(layer, expert) for expert in experts]


def lru(tokens, slots):
    held, hits = OrderedDict(), 0
    for batch in batches(tokens):
        for key in batch:
            if key in held:
                hits += 1
                held.move_to_end(key)
            else:
                held[key] = True
        while len(held) > slots and next(iter(held)) not in batch:
            held.popitem(last=False)
    return hits


def lfu(tokens, slots):
    held, count, last, hits, clock = set(), {}, {}, 0, 0
    for batch in batches(tokens):
        for key in batch:
            clock += 1
            count[key] = count.get(key, 0) + 1
            last[key] = clock
            hits += key in held
            held.add(key)
        while len(held) > slots:
            held.remove(min((key for key in held if key not in batch), key=lambda key: (count[key], last[key])))
    return hits


def belady(tokens, slots):
    look_ups = [key for batch in batches(tokens) for key in batch]
    never = len(look_ups)
    next_use, seen = [never] * never, {}
    for at in range(never - 1, -1, -1):
        next_use[at] = seen.get(look_ups[at], never)
        seen[look_ups[at]] = at
    held, last, hits, at = {}, {}, 0, 0
    for batch in batches(tokens):
        for key in batch:
            hits += key in held
            held[key], last[key] = next_use[at], at
            at += 1
        while len(held) > slots:
            # Of those that never come again the least recently used.
            del held[max((key for key in held if key not in batch), key=lambda key: (held[key], -last[key]))]
    return hits


POLICIES = {"lru": lru, "lfu": lfu, "belady": belady}
