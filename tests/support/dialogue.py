"""A small dialogue world (find a number by bisection, after looking up the range) and back ends that answer it."""

import dataclasses

from papyrax.methods.text.messages import Message, Reply, Request, chat


@dataclasses.dataclass(frozen=True)
class _Game:
    name: str
    secret: int
    low: int = 0
    high: int = -1
    guesses: tuple[int, ...] = ()


class Guessing:
    """Asks a search for the range, then a chat model for guesses; at most eight. Items: `{"id", "secret"}`."""

    def reset(self, items):
        games = tuple(_Game(str(item["id"]), item["secret"]) for item in items)
        return games, [Request("search", {"query": game.name, "k": 1}) for game in games]

    def step(self, state, replies):
        replies = iter(replies)
        games = tuple(self._advance(game, next(replies)) if not self._over(game) else game for game in state)
        return games, [self._ask(game) for game in games if not self._over(game)]

    def score(self, state):
        return {
            "found": sum(game.guesses[-1:] == (game.secret,) for game in state) / len(state),
            "guesses": [len(game.guesses) for game in state],
        }

    def _over(self, game):
        return game.guesses[-1:] == (game.secret,) or len(game.guesses) >= 8

    def _advance(self, game, reply):
        number = int(reply.text)
        if game.high < 0:
            return dataclasses.replace(game, high=number)
        low, high = (number + 1, game.high) if number < game.secret else (game.low, number)
        return dataclasses.replace(game, low=low, high=high, guesses=(*game.guesses, number))

    def _ask(self, game):
        return chat([Message("user", f"{game.name}: a number from {game.low} to {game.high - 1}")], model="agent")


def middle(requests):
    """A chat model that says the middle of the range."""
    ends = [[int(w) for w in r.payload["messages"][0].text.split() if w.isdigit()] for r in requests]
    return [Reply(str((low + high) // 2), usage={"seconds": 0.5}) for low, high in ends]


def ranges(requests):
    """A search that says that every secret lies below 64."""
    return [Reply("64") for _ in requests]
