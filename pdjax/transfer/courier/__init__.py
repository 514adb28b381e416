"""Backends whose library moves bytes but not notices: those go over a TCP connection of our own, as a courier."""

from pdjax.transfer.courier.backend import CourierBackend
from pdjax.transfer.courier.mover import Mover

__all__ = ["CourierBackend", "Mover"]
