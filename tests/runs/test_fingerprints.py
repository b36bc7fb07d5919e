import jax
import numpy as np
import pytest

from dpmp import DPSGD, runs

WORDS = np.array([4023233417, 2309737967, 19088743, 2882400001], np.uint32)
KEY = jax.random.wrap_key_data(WORDS, impl="threefry4x32")
OTHER = jax.random.wrap_key_data(WORDS[::-1].copy(), impl="threefry4x32")


def test_equal_keys_have_equal_fingerprints_and_others_have_not():
    assert runs.key_fingerprint(KEY) == runs.key_fingerprint(jax.random.clone(KEY))
    assert len(runs.key_fingerprint(KEY)) == 32
    assert runs.key_fingerprint(KEY) != runs.key_fingerprint(OTHER)
    assert runs.key_fingerprint(jax.random.key(0)) != runs.key_fingerprint(
        jax.random.key(1)
    )


def test_a_tag_depends_on_the_key_and_on_every_fact():
    tags = [
        runs.data_tag(key, *facts)
        for key in (KEY, OTHER)
        for facts in ((b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"ab", b"c", b""))
    ]
    assert len({*tags, runs.key_fingerprint(KEY)}) == 9
    assert runs.data_tag(KEY, b"ab", b"c") == tags[0]


def test_keys_of_two_generators_with_the_same_words_do_not_pass_for_one_run():
    """Their noise differs, and yet nobody should use both."""
    key = jax.random.wrap_key_data(WORDS, impl="rbg")
    assert runs.key_fingerprint(key) == runs.key_fingerprint(KEY)
    assert runs.data_tag(key, b"data") != runs.data_tag(KEY, b"data")
    short = jax.random.wrap_key_data(WORDS[:2], impl="threefry2x32")
    padded = jax.random.wrap_key_data(
        np.append(WORDS[:2], np.zeros(2, np.uint32)), impl="threefry4x32"
    )
    assert runs.key_fingerprint(short) == runs.key_fingerprint(padded)


@pytest.mark.parametrize("make", [runs.key_fingerprint, runs.data_tag])
def test_anything_but_a_key_is_refused(make):
    with pytest.raises(ValueError, match="must be one key"):
        make(np.zeros(4, np.uint32))


def test_a_ledger_holds_no_bits_of_the_key(tmp_path):
    mechanism = DPSGD(
        num_examples=100,
        expected_batch_size=10,
        iterations=10,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
    )
    entry = runs.Ledger.open(tmp_path).entry(
        mechanism,
        key_fingerprint=runs.key_fingerprint(KEY),
        data_tag=runs.data_tag(KEY, b"data"),
    )
    entry.begin(0, 1)
    content = (tmp_path / "ledger.jsonl").read_text().lower()
    for word in WORDS.tolist():
        for text in (str(word), f"{word:08x}", word.to_bytes(4, "little").hex()):
            assert text not in content
