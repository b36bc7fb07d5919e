"""The description of a machine shows what the bits of a step depend on."""

import os

import jax
import pytest

from dpmp.runs._environment import _OPTIONS, _VARIABLES, describe_environment


def test_the_description_of_one_machine_stays_the_same():
    assert describe_environment() == describe_environment()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_the_number_of_processors_in_use_is_described(monkeypatch):
    # XLA divides large sums by the processors that a process may use.
    before = describe_environment()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12345)))
    assert describe_environment() != before


@pytest.mark.parametrize("name", _VARIABLES)
def test_variables_that_change_the_program_are_described(monkeypatch, name):
    before = describe_environment()
    monkeypatch.setenv(name, "--some_flag=1")
    assert describe_environment() != before


@pytest.mark.parametrize("name", _OPTIONS)
def test_options_of_jax_are_described(monkeypatch, name):
    before, config = describe_environment(), jax.config

    class Changed:
        def __getattr__(self, option):
            return "changed" if option == name else getattr(config, option)

    monkeypatch.setattr(jax, "config", Changed())
    assert describe_environment() != before
