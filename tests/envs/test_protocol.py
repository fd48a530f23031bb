import dataclasses

import pytest

from papyrax.envs import pendulums
from papyrax.envs.protocol import DialogueWorld
from papyrax.methods.text.messages import Message, Reply, chat


@dataclasses.dataclass(frozen=True)
class Asked:
    items: tuple
    answers: tuple = ()


class Echo:
    """Asks each item once."""

    def reset(self, items):
        return Asked(tuple(items)), [chat([Message("user", item)]) for item in items]

    def step(self, state, replies):
        return dataclasses.replace(state, answers=tuple(reply.text for reply in replies)), []

    def score(self, state):
        return {"right": sum(a == b for a, b in zip(state.items, state.answers)) / len(state.items)}


def test_a_dialogue_world_is_recognised_and_replays():
    world = Echo()
    assert isinstance(world, DialogueWorld) and not isinstance(object(), DialogueWorld)

    def play():
        state, requests = world.reset(["a", "b"])
        state, requests = world.step(state, [Reply("a"), Reply("c")])
        assert requests == []
        return state

    assert play() == play() and hash(play()) == hash(play())
    assert world.score(play()) == {"right": 0.5}


def test_device_worlds_are_hashable_and_checked():
    world = pendulums.pendulums(3)
    assert hash(world) == hash(pendulums.pendulums(3)) and world == pendulums.pendulums(3)
    with pytest.raises(ValueError, match="episode_length is 0"):
        dataclasses.replace(world, episode_length=0)
    with pytest.raises(ValueError, match="n_actions is 0 with discrete=True"):
        dataclasses.replace(world, discrete=True)
    with pytest.raises(ValueError, match="privileged_dim is 4"):
        dataclasses.replace(world, privileged_dim=4)
