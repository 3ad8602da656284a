"""What was known at the time of a rating: dense features that look only back, and only at labels of training rows.

Axes:  N ratings,  D dense features.
"""

import numpy as np
from numpy.typing import NDArray

from loka.data.text_fields import Flags, Integers

_SECONDS_A_DAY = 86_400
_SECONDS_A_YEAR = 365.2425 * _SECONDS_A_DAY


def earlier_in_group(group_N: Integers, time_N: Integers) -> tuple[Integers, Integers]:
    """For rows sorted by group and time: where each row's strictly earlier rows of the same group begin and end."""
    new_group_N = np.append(True, group_N[1:] != group_N[:-1])
    new_time_N = new_group_N | np.append(True, time_N[1:] != time_N[:-1])
    place_N = np.arange(len(group_N))
    return np.maximum.accumulate(place_N * new_group_N), np.maximum.accumulate(place_N * new_time_N)


def earlier_label_mean(group_N: Integers, time_N: Integers, label_N: Flags, is_train_N: Flags) -> NDArray[np.float64]:
    """Mean label of the training rows of the same group that are strictly earlier; NaN where there are none."""
    order_N = np.lexsort((time_N, group_N))
    start_N, stop_N = earlier_in_group(group_N[order_N], time_N[order_N])
    trained = np.append(0, is_train_N[order_N].cumsum())
    liked = np.append(0, (label_N & is_train_N)[order_N].cumsum())
    n_N = trained[stop_N] - trained[start_N]
    mean_N = np.empty(len(group_N))
    mean_N[order_N] = np.where(n_N > 0, (liked[stop_N] - liked[start_N]) / np.maximum(n_N, 1), np.nan)
    return mean_N


def earlier_count(group_N: Integers, time_N: Integers) -> Integers:
    """How many rows of the same group are strictly earlier."""
    order_N = np.lexsort((time_N, group_N))
    start_N, stop_N = earlier_in_group(group_N[order_N], time_N[order_N])
    count_N = np.empty(len(group_N), np.int64)
    count_N[order_N] = stop_N - start_N
    return count_N


def dense_features(
    user_N: Integers, movie_N: Integers, time_N: Integers, label_N: Flags, is_train_N: Flags, year_N: Integers
) -> tuple[NDArray[np.float32], Flags]:
    """Dense features of rows that are sorted by user and time, and which features are counts or durations."""
    start_N, stop_N = earlier_in_group(user_N, time_N)
    has_past_N = stop_N > start_N
    since_last_N = np.where(has_past_N, time_N - time_N[np.maximum(stop_N - 1, 0)], np.nan)
    since_first_N = np.where(has_past_N, time_N - time_N[start_N], np.nan)
    hour_angle_N = 2 * np.pi * (time_N % _SECONDS_A_DAY) / _SECONDS_A_DAY
    columns = [  # (values, is a count or duration)
        (earlier_count(user_N, time_N), True),
        (earlier_label_mean(user_N, time_N, label_N, is_train_N), False),
        (earlier_count(movie_N, time_N), True),
        (earlier_label_mean(movie_N, time_N, label_N, is_train_N), False),
        (since_last_N, True),
        (since_first_N, True),
        (1970 + time_N / _SECONDS_A_YEAR - year_N, True),
        (np.sin(hour_angle_N), False),
        (np.cos(hour_angle_N), False),
    ]
    dense_ND = np.stack([values for values, _ in columns], 1).astype(np.float32)
    return dense_ND, np.array([is_count for _, is_count in columns])
