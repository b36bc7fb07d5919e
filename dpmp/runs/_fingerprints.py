"""Fingerprints of keys and data, which a ledger may hold without revealing either."""

import hashlib

import jax
import numpy as np

from dpmp import _random

_BYTES = 16


def key_fingerprint(prng_key: jax.Array) -> str:
    """A hash of a key: two keys with one fingerprint are the same key.

    Args:
      prng_key: the root key of the noise of a run. A key of 128 bits from the operating
        system cannot be found from its fingerprint. A key that was made from a small
        seed can, by trying all seeds.

    Raises:
      ValueError: if `prng_key` is not a jax key.
    """
    return _hash(_words(prng_key), b"dpmp key")


def data_tag(prng_key: jax.Array, *facts: bytes) -> str:
    """A hash of the facts that, beside the key, decide what the steps of a run release.

    A plain hash of private data would release something about them: anyone who guesses
    the data could confirm the guess. So this hash depends on the secret key as well.
    Nothing is lost by that, because a ledger compares only tags of runs with one key.

    Args:
      prng_key: the root key of the noise of the run.
      *facts: descriptions of the data, of the sampling key, of the loss and so on.

    Raises:
      ValueError: if `prng_key` is not a jax key.
    """
    words = _words(prng_key)
    generator = str(jax.random.key_impl(prng_key)).encode()
    # Each fact is hashed by itself, so that ("ab", "c") and ("a", "bc") differ.
    hashes = [hashlib.blake2b(fact).digest() for fact in (generator, *facts)]
    return _hash(b"".join(hashes), b"dpmp data", key=words)


def _words(prng_key: jax.Array) -> bytes:
    _random.check_key(prng_key)
    return np.asarray(_random.key_words(prng_key)).astype("<u4").tobytes()


def _hash(content: bytes, purpose: bytes, key: bytes = b"") -> str:
    return hashlib.blake2b(
        content, digest_size=_BYTES, person=purpose, key=key
    ).hexdigest()
