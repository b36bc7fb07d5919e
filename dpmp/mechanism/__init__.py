"""DPSGD describes one private training run: sampling, clipping, arithmetic and noise.

The training steps and the privacy accounting read the same object, so that they cannot
disagree. See `DPSGD` for an example.
"""

from dpmp.clipping import Released
from dpmp.mechanism._dpsgd import DPSGD
from dpmp.mechanism._privacy_cost import PrivacyCost, guarantee_of, guarantee_of_stages

__all__ = ["DPSGD", "PrivacyCost", "Released", "guarantee_of", "guarantee_of_stages"]
