"""The paper's numbers (Xie et al. 2024): Table 1, personal models, mean over clients; Table 2, global models."""

from __future__ import annotations

# CIFAR-10 Local, Global, 10.1, 10-C; Office-Home Local, Global; CheXpert (Dir(0.3)) Local, Global
TABLE_1: dict[str, tuple[float, ...]] = {
    "standalone": (85.94, 29.77, 25.82, 26.67, 81.64, 59.15, 65.06, 65.45),
    "mtl": (86.24, 29.46, 25.64, 26.40, 81.82, 59.25, 65.15, 65.48),
    "fedavg-ft": (88.91, 43.99, 35.49, 36.51, 79.42, 77.19, 70.16, 70.60),
    "pfedme": (90.73, 45.06, 36.51, 37.65, 80.21, 75.69, 65.07, 64.86),
    "apfl": (90.74, 43.92, 35.83, 36.51, 81.24, 76.98, 68.98, 68.96),
    "ditto": (90.21, 53.82, 42.72, 44.32, 81.77, 75.66, 68.79, 68.86),
    "fedbn": (90.37, 43.18, 35.01, 36.29, 81.86, 74.26, 68.74, 68.83),
    "fedalt-input": (87.07, 32.23, 27.49, 28.51, 81.07, 65.85, 67.63, 67.74),
    "fedsim-input": (87.93, 33.07, 28.21, 29.15, 82.45, 67.66, 67.49, 67.54),
    "lg-fedavg": (86.70, 29.96, 25.97, 26.83, 82.04, 63.57, 65.78, 66.23),
    "fedrep": (87.76, 35.19, 30.15, 30.68, 79.05, 74.17, 66.66, 66.52),
    "fedalt-output": (89.68, 40.68, 33.61, 34.30, 83.24, 70.62, 68.27, 68.36),
    "fedsim-output": (89.75, 41.98, 34.21, 35.31, 82.91, 72.34, 68.22, 68.12),
    "fedalt-adapter": (87.26, 31.51, 27.38, 27.77, 81.41, 57.88, 72.13, 74.67),
    "fedsim-adapter": (87.76, 31.97, 27.76, 28.10, 82.14, 58.62, 71.75, 74.09),
    "perada-no-kd": (91.27, 53.81, 42.50, 44.45, 83.31, 76.55, 76.77, 77.59),
    "perada": (91.82, 59.05, 47.25, 48.53, 83.58, 77.20, 76.98, 77.88),
}
# CIFAR-10 Global, 10.1, 10-C
TABLE_2: dict[str, tuple[float, float, float]] = {
    "fedavg": (69.34, 54.95, 57.07),
    "fedprox": (69.64, 54.75, 56.84),
    "feddyn": (70.36, 56.30, 55.91),
    "feddf": (74.83, 60.95, 61.23),
    "pfedme": (68.25, 52.55, 56.33),
    "apfl": (69.79, 53.60, 57.06),
    "ditto": (69.95, 55.25, 57.33),
    "perada-no-kd": (74.22, 57.60, 61.40),
    "perada": (76.77, 62.50, 64.47),
}
COLUMNS = {  # experiment -> metric -> column of TABLE_1
    "main": {"Local": 0, "Global": 1, "corruptions": 3},
    "others": {"Local": 0, "Global": 1, "corruptions": 3},
    "pacs": {"Local": 4, "Global": 5},
    "xrays": {"Local": 6, "Global": 7},
}
GLOBAL_COLUMNS = {"global model": 0, "global model, corruptions": 2}  # of TABLE_2
SAME = {"fedavg-ft": "fedavg"}  # method -> whose global model it trains


def of(experiment: str, metric: str, method: str) -> float | None:
    """The paper's number for the same cell; None where it has none."""
    if metric in GLOBAL_COLUMNS:
        found = TABLE_2.get(SAME.get(method, method)) if experiment in ("main", "others") else None
        return None if found is None else found[GLOBAL_COLUMNS[metric]]
    column = COLUMNS.get(experiment, {}).get(metric)
    row = TABLE_1.get(method)
    return None if column is None or row is None else row[column]
