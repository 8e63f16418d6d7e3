"""Prompts: sources ▶ rows ▶ columns ▶ conversations ▶ rendering ▶ Dataset (loading), and the order of visits."""

from services.coordinator.data.loading import load_dataset
from services.coordinator.data.order import Order
from services.coordinator.data.prompts import Dataset, LeftOut, Prompt

__all__ = ["Dataset", "LeftOut", "Order", "Prompt", "load_dataset"]
