"""The driver of everything that is not a learner: many items of a dialogue world in flight, their open requests
answered in batches.

Every item has a world state of its own (`world.reset([item])`). A round gathers the open requests of all items in
flight, hands each kind to its back end as one list, and steps every world with its replies; closed items are scored,
appended to the file as one JSON line each (on the disk before the next round), and replaced by waiting ones. A
process killed at any instant and started again goes on with the items that have no line. The numbers are the same if
back ends answer equal requests equally, whatever else is in the batch.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from papyrax.envs.protocol import DialogueWorld
from papyrax.methods.text.messages import Reply, Request, request_hash, to_json
from papyrax.train.errors import RunFolderError, UserError

Backend = Callable[[list[Request]], list[Reply]]


class BackendError(UserError):
    """A back end raised, or gave the wrong number of replies; the message names its kind."""


class MissingReply(BackendError):
    """A recorded back end was asked something that was never recorded; the message names the request's hash."""


class _WrongCount(BackendError):
    """A back end gave another number of replies than it was asked requests: a fault of its own, which always stops the
    run."""


@dataclasses.dataclass
class _Item:
    """An item in flight."""

    id: str
    state: Hashable
    requests: list[Request]
    seen: Any = dataclasses.field(default_factory=hashlib.sha256)
    asked: int = 0
    error: str | None = None


def run_items(
    world: DialogueWorld,
    items: Iterable[Any],
    backends: Mapping[str, Backend],
    out: Path | str,
    *,
    batch: int = 16,
    retries: int = 0,
    on_error: Literal["record", "stop"] = "record",
    redo_errors: bool = False,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Drives every item to its end and returns one row an item, in the order of `items`.

    Args:
      world: a dialogue world; it is reset with one item at a time.
      items: mappings with an "id" or objects with an `id`; ids are unique, and made strings.
      backends: for each kind of request a function from requests to as many replies, in order. A reply with `error`
        set goes to the world as it is (a back end that can tell which request failed does that); a back end that
        raises is dealt with by `on_error`.
      out: the JSON-lines file, in a folder that exists or can be made. Items that have a line there are not driven
        again.
      batch: items in flight.
      retries: how many more times a list of requests is tried after its back end raised, waiting 0.1, 0.2, 0.4, …
        (at most 10) seconds.
      on_error: "record": the failed list is tried request by request, and an item whose request fails ends with a
        line that holds the error and no score; "stop": the error is raised, and the finished items keep their lines.
      redo_errors: drive the items again whose line holds an error.
      progress: called with (items done, items in all).
      say: told, in a sentence, what was dropped from the file.

    Returns:
      rows `{"id", "score", "transcript", "requests", "error"}`: the world's scores (None after an error), a hash
      over all requests and replies (without `usage`), the number of requests, and None or a sentence.

    Raises:
      ValueError: duplicate ids, an item without id, a line of the file that isn't JSON before the last, `batch`
        below 1.
      BackendError: no back end for a kind, a wrong number of replies, or an error with `on_error="stop"`.
      RunFolderError: the file can't be written, or another process is writing it.
    """
    if batch < 1 or retries < 0:
        raise ValueError(f"batch must be at least 1 and retries at least 0, got {batch} and {retries}.")
    if on_error not in ("record", "stop"):
        raise ValueError(f"on_error must be 'record' or 'stop', got {on_error!r}.")
    items = list(items)
    ids = [_id(item, i) for i, item in enumerate(items)]
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"items holds {len(twice)} ids more than once, the first of them {twice[0]!r}.")
    out = Path(out)
    with _Lines(out) as lines:
        done = {row["id"]: row for row in lines.read(say)}
        if redo_errors and any(row["error"] for row in done.values()):
            done = {name: row for name, row in done.items() if not row["error"]}
            lines.replace(done.values())
        waiting = iter([(name, item) for name, item in zip(ids, items) if name not in done])
        finished = sum(name in done for name in ids)
        flight: list[_Item] = []
        while True:
            flight += [_Item(name, *world.reset([item])) for name, item in _take(waiting, batch - len(flight))]
            closed = [item for item in flight if item.error or not item.requests]
            rows = [_row(world, item) for item in closed]
            if rows:
                # the returned row is what the file says, so that a resumed run returns the very same values
                done.update((row["id"], row) for row in lines.append(rows))
            finished += len(rows)
            if progress is not None and (rows or not flight):
                progress(finished, len(items))
            flight = [item for item in flight if not item.error and item.requests]
            if closed:
                continue
            if not flight:
                break
            _round(world, flight, backends, retries, on_error)
    return [done[name] for name in ids]


def _id(item: Any, index: int) -> str:
    name = item.get("id") if isinstance(item, Mapping) else getattr(item, "id", None)
    if name is None:
        raise ValueError(f"items[{index}] has no id, wanted a mapping with an 'id' or an object with an attribute id.")
    return str(name)


def _take(waiting: Iterator[tuple[str, Any]], count: int) -> list[tuple[str, Any]]:
    return [pair for _, pair in zip(range(count), waiting)]


def _row(world: DialogueWorld, item: _Item) -> dict[str, Any]:
    score = None if item.error else world.score(item.state)
    return {
        "id": item.id,
        "score": score,
        "transcript": item.seen.hexdigest(),
        "requests": item.asked,
        "error": item.error,
    }


def _round(
    world: DialogueWorld, flight: list[_Item], backends: Mapping[str, Backend], retries: int, on_error: str
) -> None:
    """Answers the open requests of all items in flight and steps their worlds."""
    replies: dict[tuple[int, int], Reply | BackendError] = {}
    places: dict[str, list[tuple[int, int]]] = {}
    for i, item in enumerate(flight):
        for j, request in enumerate(item.requests):
            places.setdefault(request.kind, []).append((i, j))
    for kind, where in places.items():
        if kind not in backends:
            have = ", ".join(sorted(backends)) or "none"
            raise BackendError(
                f"The world asks for {kind!r}, but there is no back end of that kind (there is: {have})."
            )
        requests = [flight[i].requests[j] for i, j in where]
        replies.update(zip(where, _ask(kind, backends[kind], requests, retries, on_error)))
    for i, item in enumerate(flight):
        answers = [replies[i, j] for j in range(len(item.requests))]
        given = [a for a in answers if isinstance(a, Reply)]
        failed = [a for a in answers if isinstance(a, BackendError)]
        item.asked += len(answers)
        for request, answer in zip(item.requests, answers):
            item.seen.update(request_hash(request).encode())
            item.seen.update(b"!" if isinstance(answer, BackendError) else _reply_bytes(answer))
        if failed:
            item.error = str(failed[0])
        else:
            item.state, item.requests = world.step(item.state, given)


def _ask(
    kind: str, backend: Backend, requests: list[Request], retries: int, on_error: str
) -> Sequence[Reply | BackendError]:
    """One reply or one error a request: the whole list first, with retries, then each request alone."""
    problem = BackendError(f"The {kind} back end was not asked.")
    for attempt in range(retries + 1):
        try:
            return _checked(kind, backend, requests)
        except (MissingReply, _WrongCount) as error:
            # asking again would not help
            problem = error
            break
        except Exception as error:
            problem = BackendError(f"The {kind} back end failed with {_sentence(error)}")
            problem.__cause__ = error
            if attempt < retries:
                time.sleep(min(0.1 * 2**attempt, 10))
    if on_error == "stop" or isinstance(problem, _WrongCount):
        raise problem
    if len(requests) == 1:
        return [problem]
    return [_ask(kind, backend, [request], 0, on_error)[0] for request in requests]


def _checked(kind: str, backend: Backend, requests: list[Request]) -> list[Reply]:
    replies = list(backend(list(requests)))
    if len(replies) != len(requests):
        raise _WrongCount(f"The {kind} back end gave {len(replies)} replies to {len(requests)} requests.")
    return replies


def _sentence(error: Exception) -> str:
    text = str(error).strip().rstrip(".")
    return f"{type(error).__name__}: {text}." if text else f"{type(error).__name__}."


def _reply_json(reply: Reply) -> dict[str, Any]:
    return {f.name: to_json(getattr(reply, f.name)) for f in dataclasses.fields(reply)}


def _reply_bytes(reply: Reply) -> bytes:
    body = {name: value for name, value in _reply_json(reply).items() if name != "usage"}
    return json.dumps(body, sort_keys=True, ensure_ascii=False).encode()


def _reply_from(data: Mapping[str, Any]) -> Reply:
    def frozen(value: Any) -> Any:
        return tuple(frozen(v) for v in value) if isinstance(value, list) else value

    return Reply(**{name: frozen(value) for name, value in data.items()})


class Recorded:
    """A back end of any kind that answers from a file of recorded replies and raises `MissingReply` for everything
    else."""

    def __init__(self, path: Path | str):
        path = Path(path)
        if not path.exists():
            raise UserError(f"There are no recorded replies at {path}.")
        self.path = path
        self.replies = {
            row["hash"]: _reply_from(row["reply"]) for row in _parse(path, path.read_bytes(), lambda _: None)[0]
        }

    def __call__(self, requests: list[Request]) -> list[Reply]:
        hashes = [request_hash(request) for request in requests]
        missing = [h for h in hashes if h not in self.replies]
        if missing:
            request = requests[hashes.index(missing[0])]
            raise MissingReply(f"{self.path.name} has no reply to the {request.kind} request {missing[0]}.")
        return [self.replies[h] for h in hashes]


class Recording:
    """Wraps a back end and appends what it says to a file that `Recorded` reads.

    Equal requests get equal replies: the wrapped back end is only asked what the file does not hold yet, so a
    recording continues across processes and a replay meets the same dialogue. What it raises is not recorded; a
    reply with an error is.
    """

    def __init__(self, backend: Backend, path: Path | str, say: Callable[[str], None] = print):
        self.backend = backend
        self.path = Path(path)
        with _Lines(self.path) as lines:
            self.replies = {row["hash"]: _reply_from(row["reply"]) for row in lines.read(say)}

    def __call__(self, requests: list[Request]) -> list[Reply]:
        hashes = [request_hash(request) for request in requests]
        new = {h: request for h, request in zip(hashes, requests) if h not in self.replies}
        if new:
            replies = _checked("wrapped", self.backend, list(new.values()))
            rows = [
                {"hash": h, "kind": request.kind, "reply": _reply_json(reply), "request": to_json(request.payload)}
                for (h, request), reply in zip(new.items(), replies)
            ]
            with _Lines(self.path) as lines:
                lines.append(rows)
            self.replies.update(zip(new, replies))
        return [self.replies[h] for h in hashes]


class _Lines:
    """A locked JSON-lines file whose appended lines are on the disk when `append` returns."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> "_Lines":
        with self._told():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.handle)
            raise RunFolderError(f"Another process is writing {self.path}.") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)

    def read(self, say: Callable[[str], None]) -> list[dict[str, Any]]:
        rows, good = _parse(self.path, self.path.read_bytes(), say)
        with self._told():
            os.ftruncate(self.handle, good)
        return rows

    def append(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        texts = [json.dumps(row, ensure_ascii=False, default=_native) for row in rows]
        data = "".join(text + "\n" for text in texts).encode()
        with self._told():
            while data:
                data = data[os.write(self.handle, data) :]
            os.fsync(self.handle)
        return [json.loads(text) for text in texts]

    def replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Leaves only these rows. They are first written aside in full, so that a kill in between costs nothing but
        the file aside."""
        aside = _Lines(self.path.with_name(f".{self.path.name}.{os.getpid()}"))
        with aside:
            aside.append(rows)
            with self._told():
                os.replace(aside.path, self.path)
            os.dup2(aside.handle, self.handle)  # the lock goes along with the open file

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFolderError(f"Cannot write {self.path}: {error.strerror or error}.") from error


def _parse(path: Path, data: bytes, say: Callable[[str], None]) -> tuple[list[dict[str, Any]], int]:
    """The rows of a JSON-lines file and the number of its bytes that they take; a last line that a kill cut short is
    dropped and said."""
    rows, good = [], 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if row is None and number < len(lines):
            raise ValueError(
                f"line {number} of {path} is not JSON and not the last line, so the file was not merely cut short."
            )
        if row is None:
            say(f"The last line of {path} was cut short and is dropped; what it held is done again.")
            break
        rows.append(row)
        good += len(line)
    return rows, good


def _native(value: Any) -> Any:
    """NumPy and JAX values as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"score holds a {type(value).__name__}, wanted numbers, strings, lists or mappings.")
