"""A minimum without derivatives (Nelder and Mead, 1965), restarted where it stops: for fitting a few constants."""
import numpy as np


def minimize(loss, start, *, step=0.3, evaluations=400, restarts=3):
    best = np.asarray(start, float)
    for _ in range(restarts):
        best = _descend(loss, best, step, evaluations)
    return best


def _descend(loss, start, step, evaluations):
    n = len(start)
    points = [np.array(start)] + [start + step * np.eye(n)[i] for i in range(n)]
    values = [loss(p) for p in points]
    used = n + 1
    while used < evaluations:
        order = np.argsort(values, kind="stable")
        points, values = [points[i] for i in order], [values[i] for i in order]
        if abs(values[-1] - values[0]) < 1e-5 * max(abs(values[0]), 1e-9):
            break
        centre = np.mean(points[:-1], axis=0)
        towards = centre - points[-1]
        tried = [(1.0, loss(centre + towards))]
        used += 1
        if tried[0][1] < values[0]:
            tried.append((2.0, loss(centre + 2 * towards)))
            used += 1
        elif tried[0][1] >= values[-2]:
            tried.append((-0.5, loss(centre - 0.5 * towards)))
            used += 1
        scale, value = min(tried, key=lambda each: each[1])
        if value < values[-1]:
            points[-1], values[-1] = centre + scale * towards, value
        else:
            points = [points[0]] + [points[0] + 0.5 * (p - points[0]) for p in points[1:]]
            values = [values[0]] + [loss(p) for p in points[1:]]
            used += n
    return points[int(np.argmin(values))]
