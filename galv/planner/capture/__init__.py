"""A model as a graph of units with facts, traced on the meta device. Nothing is computed and nothing is allocated."""

from galv.planner.capture.model_graph import capture as capture
