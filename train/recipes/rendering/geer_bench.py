"""bench"""


def bench(config, bench):
    return []
