"""Prefix affinity: the prefixes ("heads") of a prompt, the choice of a replica, and its memory."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.replicas.affinity import ATTENDED, BOUND, Affinity, Key, read_key

REPLICAS = ("a", "b", "c", "d")
IDLE = dict.fromkeys(REPLICAS, 0)


def body(text: str, **more: object) -> bytes:
    return json.dumps({"model": "m", "prompt": text, **more}).encode()


def key_of(text: str, **more: object) -> Key:
    return read_key(body(text, **more))


def text(number: int, length: int) -> str:
    """Return a text of `length` characters; texts of different numbers differ everywhere."""
    return f"{number:08x}" * (length // 8)


loads = st.fixed_dictionaries({name: st.integers(0, 10**6) for name in REPLICAS})


@given(st.integers(0, 60_000), st.integers(1, 3_000), st.integers(1, 3_000))
def test_prompts_share_the_heads_of_their_common_prefix(shared: int, one: int, other: int) -> None:
    """Law: two prompts have the same digest of a head if and only if both begin with that head."""
    begin = text(1, shared)
    first, second = key_of(begin + "x" * one), key_of(begin + "y" * other)
    equal = [a == b for a, b in zip(first.heads, second.heads, strict=False)]
    end = (len('"') + len(begin)) // 4
    within = [end_ <= end for end_, _ in zip(first.ends, second.heads, strict=False)]
    assert equal == within
    assert first.ends[: len(equal)] == second.ends[: len(equal)]


def test_later_turns_share_the_heads_of_the_first_turn() -> None:
    turn = {"role": "user", "content": text(1, 2_000)}
    reply = {"role": "assistant", "content": text(2, 2_000)}
    for field in ("messages", "input"):
        first = read_key(json.dumps({field: [turn], "tools": [{"type": "function"}]}).encode())
        next_ = read_key(
            json.dumps({"tools": [{"type": "function"}], field: [turn, reply, turn]}).encode()
        )
        assert len(first.heads) >= 7
        assert next_.heads[: len(first.heads)] == first.heads


@pytest.mark.parametrize(
    "more", [{"cache_salt": "s"}, {"instructions": "be brief"}, {"tools": [{"type": "function"}]}]
)
def test_other_salts_tools_and_instructions_share_no_head(more: dict[str, object]) -> None:
    plain, other = key_of(text(1, 2_000)), key_of(text(1, 2_000), **more)
    assert not {*plain.heads} & {*other.heads}


def test_a_long_prompt_has_few_heads_and_each_begins_the_next() -> None:
    key = key_of(text(1, 4_000_000))
    assert len(key.heads) == len(key.ends) < 150
    steps = zip((0, *key.ends), key.ends, strict=False)
    assert all(end - before <= max(64, before // 16 + 1) for before, end in steps)


@given(st.binary(max_size=2_000) | st.text(max_size=500).map(str.encode))
def test_any_bytes_have_a_key(data: bytes) -> None:
    key = read_key(data)
    assert key.prompt_tokens <= len(data) // 4 + 1


@pytest.mark.parametrize("field", ["prompt", "max_tokens", "unknown"])
def test_a_body_that_is_nested_too_deep_has_a_key(field: str) -> None:
    """Bug: on Ray, a request with deeply nested JSON was never answered: the router raised."""
    data = json.dumps({field: 0}).encode().replace(b"0", b"[" * 200_000 + b"]" * 200_000)
    assert read_key(data).prompt_tokens >= len(data) // 4


@pytest.mark.parametrize("wrong", ["many", None, -1, 1.5, True, [], {}])
def test_an_invalid_limit_counts_as_not_given(wrong: object) -> None:
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        assert key_of("x", **{name: wrong}).reply_tokens == key_of("x").reply_tokens
        assert key_of("x", **{name: 7}).reply_tokens == 7


def test_a_truncated_body_has_the_heads_of_its_beginning() -> None:
    """Law: the heads of what is left are right, since a proxy may forward only the beginning."""
    whole = json.dumps({"model": "m", "messages": [{"content": text(1, 9_000)}]}).encode()
    one, other = read_key(whole[:4_000]), read_key(whole[:6_000])
    assert len(one.heads) == 4_000 // 256
    assert other.heads[: len(one.heads)] == one.heads


@given(loads, st.lists(st.tuples(st.integers(0, 5), st.sampled_from(REPLICAS)), max_size=30))
def test_the_chosen_replica_is_within_the_bound(
    loads: dict[str, int], sent: list[tuple[int, str]]
) -> None:
    """Law: whatever was sent before, the chosen replica's load is at most the bound times the mean
    plus the tokens that its cache saves. The order contains every replica once."""
    affinity = Affinity()
    for number, replica in sent:
        affinity.send(key_of(text(number, 4_000)), replica)
    key = key_of(text(0, 4_000) + text(9, 2_000))
    order = affinity.order(key, loads)
    assert sorted(order) == sorted(REPLICAS)
    saved = 1_000 if (0, order[0]) in sent else 0
    assert loads[order[0]] <= BOUND * sum(loads.values()) / len(loads) + saved


@given(loads)
def test_without_hits_the_least_loaded_replica_is_next(loads: dict[str, int]) -> None:
    order = Affinity().order(key_of(text(0, 1_000)), loads)
    assert [loads[name] for name in order] == sorted(loads.values())


@given(st.integers(0, 900), st.sampled_from(REPLICAS), st.sampled_from(REPLICAS))
def test_the_longest_head_wins_where_there_is_room(load: int, longer: str, shorter: str) -> None:
    """Law: the replica with the longest head wins up to an extra load of the tokens saved."""
    affinity = Affinity()
    affinity.send(key_of(text(0, 1_000)), shorter)
    affinity.send(key_of(text(0, 6_000)), longer)
    assert affinity.order(key_of(text(0, 9_000)), {**IDLE, longer: load})[0] == longer


@given(st.integers(2, 6), st.integers(0, 6_000), st.integers(1, 256))
def test_a_popular_head_is_spread_over_replicas(replicas: int, length: int, reply: int) -> None:
    """Law: no load exceeds the bound times the mean plus the tokens saved and one request."""
    affinity, loads = Affinity(), dict.fromkeys("abcdef"[:replicas], 0)
    head, most = text(0, length), 0
    for number in range(300):
        key = key_of(head + text(1 + number, 400), max_tokens=reply)
        name = affinity.order(key, loads)[0]
        tokens = affinity.send(key, name)
        most = max(most, tokens)
        loads[name] += tokens
        mean = sum(loads.values()) / replicas
        assert max(loads.values()) <= BOUND * mean + length / 4 + most


def test_the_bounds_of_several_routers_add_up() -> None:
    """Law: the bound holds for the sum over routers, though each knows only its own requests."""
    routers = [(Affinity(), dict.fromkeys(REPLICAS, 0)) for _ in range(3)]
    for number in range(900):
        affinity, loads = routers[number % 3]
        key = key_of(text(0, 2_000) + text(number + 1, 400), max_tokens=100)
        name = affinity.order(key, loads)[0]
        loads[name] += affinity.send(key, name)
    total = Counter[str]()
    for _, loads in routers:
        total.update(loads)
    mean = sum(total.values()) / len(REPLICAS)
    assert max(total.values()) <= BOUND * mean + len(routers) * 1_000


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40, unique=True))
def test_a_replica_that_comes_or_goes_moves_its_own_keys_only(numbers: list[int]) -> None:
    """Law: even with no memory, only that replica's keys move. So independent routers agree."""
    keys = [key_of(text(number, 1_000)) for number in numbers]
    fewer = [Affinity().order(key, IDLE)[0] for key in keys]
    more = [Affinity().order(key, {**IDLE, "e": 0})[0] for key in keys]
    assert all(new in (old, "e") for old, new in zip(fewer, more, strict=True))


def test_keys_spread_over_idle_replicas() -> None:
    chosen = Counter(Affinity().order(key_of(text(n, 1_000)), IDLE)[0] for n in range(400))
    assert min(chosen[name] for name in REPLICAS) > 60


def test_scaling_moves_no_prefix_that_a_replica_holds() -> None:
    affinity, loads = Affinity(), dict(IDLE)
    keys = [key_of(text(number, 4_000)) for number in range(50)]
    places = [affinity.order(key, loads)[0] for key in keys]
    for key, place in zip(keys, places, strict=True):
        affinity.send(key, place)
    affinity.keep([*REPLICAS, "e"])
    assert [affinity.order(key, {**loads, "e": 0})[0] for key in keys] == places
    affinity.keep(["b", "c", "d", "e"])
    left = {name: load for name, load in loads.items() if name != "a"}
    for key, place in zip(keys, places, strict=True):
        assert place == "a" or affinity.order(key, left)[0] == place


def test_memory_is_bounded_and_evicts_long_heads_first() -> None:
    affinity = Affinity(heads=20)
    key, other = key_of(text(0, 5_000)), key_of(text(1, 5_000))
    assert len(key.heads) > 15
    first = affinity.send(key, "a")
    assert first == key.prompt_tokens + key.reply_tokens
    cached = key.ends[-1]
    assert affinity.send(key, "a") == first - cached + cached // ATTENDED
    affinity.send(other, "a")
    left = 20 - len(other.heads)
    cached = key.ends[left - 1]
    assert affinity.send(key, "a") == first - cached + cached // ATTENDED


def test_the_least_recently_used_heads_are_evicted_first() -> None:
    one, *others = (key_of(text(number, 1_000)) for number in range(9))
    affinity = Affinity(heads=2 * len(one.heads))
    new = affinity.send(one, "a")
    for other in others:
        affinity.send(other, "a")
        assert affinity.send(one, "a") < new


def test_a_removed_replica_is_forgotten() -> None:
    affinity, key = Affinity(), key_of(text(0, 4_000))
    new = affinity.send(key, "a")
    affinity.keep(["b"])
    assert affinity.send(key, "a") == new


def test_a_bound_below_the_mean_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bound = 0\.9: .* from 1"):
        Affinity(bound=0.9)
