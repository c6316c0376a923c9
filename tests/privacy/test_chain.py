import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydp.privacy import chain

records = st.dictionaries(
    st.text(max_size=5).filter(lambda name: name != chain.FIELD),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    max_size=4,
)


def write(items, start="0"):
    lines, head = [], start
    for item in items:
        line, head = chain.link(item, head)
        lines.append(line[:-1])
    return lines, head


def read(lines, start="0"):
    found, head = [], start
    for line in lines:
        record, head = chain.follow(line, head)
        found.append(record)
    return found, head


@given(st.lists(records, max_size=5))
def test_what_was_written_is_read(items):
    lines, head = write(items)
    assert read(lines) == (items, head)


@given(st.data(), st.lists(records, min_size=2, max_size=5))
def test_a_line_that_is_lost_moved_repeated_or_changed_breaks_the_chain(data, items):
    items = [{**item, "n": number} for number, item in enumerate(items)]
    lines, _ = write(items)
    at = data.draw(st.integers(0, len(lines) - 2))
    kind = data.draw(st.sampled_from(["lost", "moved", "repeated", "changed", "spaced"]))
    if kind == "lost":
        del lines[at]
    elif kind == "moved":
        lines[at], lines[at + 1] = lines[at + 1], lines[at]
    elif kind == "repeated":
        lines.insert(at, lines[at])
    elif kind == "changed":
        record = json.loads(lines[at])
        lines[at] = json.dumps({**record, "n": -1}).encode()
    else:
        lines[at] = lines[at].replace(b": ", b":  ", 1)
    with pytest.raises(chain.BrokenChain):
        read(lines)


@given(st.data(), records)
def test_no_bit_can_be_flipped(data, item):
    (line,), _ = write([item])
    position = data.draw(st.integers(0, len(line) - 1))
    flipped = bytearray(line)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError):
        chain.follow(bytes(flipped), "0")


def test_the_end_can_be_cut_without_a_trace_so_heads_are_noted_elsewhere():
    lines, head = write([{"n": 0}, {"n": 1}])
    assert read(lines[:1])[1] != head


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{}", b'{"chain": 3}', b"\xff", b"[" * 100_000, b'{"a": NaN}', b"9" * 5000]
)
def test_what_is_no_chained_line(line):
    with pytest.raises(ValueError):
        chain.follow(line, "0")
