"""Options, runs, statistics, tables and plots that the experiments share."""

# ruff: noqa: F401 - experiments use these names as `_shared.NAME`.

from experiments._shared.options import (
    CONTEXT,
    Experiment,
    Options,
    Plan,
    names_among,
    positive,
    power_label,
    power_variants,
    state_bytes,
)
from experiments._shared.plots import Panel, curves_panel, draw_lines, draw_values, lines
from experiments._shared.runs import (
    Folders,
    alternate,
    curve_rows,
    evaluation,
    final_loss,
    heldout_curve,
    mean_curves,
    model,
    parameters,
    relative,
    require_same_data,
    restore_arrays,
    save_arrays,
    settings,
    stage,
    train,
    train_all,
    update,
)
from experiments._shared.statistics import Mean, Row, differences, from_json, mean, means
from experiments._shared.tables import Table, difference_table, loss_labels, loss_table, number_table
