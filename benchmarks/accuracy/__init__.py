"""The parts of the accuracy benchmark: rows as layouts, metrics, profiles of collectives and operators, fits."""
