"""Linear support vector machines, one for each class."""

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.svm import LinearSVC

from histocoder.ops import kernels

MAX_PASSES = 30  # over the rows, which come close to the optimum
MIN_PASSES = 6  # which come close enough
# Rows times classes times passes, beyond which there are fewer passes: 8 s of two cores
_MAX_VISITS = 200_000_000
MAX_WEIGHTS = 1 << 26  # of all machines together, 128 MB in fp16


def fit_machines(
    features: csr_matrix,
    rows: np.ndarray,
    class_ids: np.ndarray,
    weights: np.ndarray,
    *,
    min_passes: int = MIN_PASSES,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit a linear support vector machine for each class, its rows against all others.

    They are those of scikit-learn's `LinearSVC`, of large tables after a few passes over the rows
    instead of at the optimum, and do not depend on the number of threads. Without the kernels they
    are its own, in one thread.

    Parameters
    ----------
    features : csr_matrix of shape (n, num_features)
    rows, class_ids : ndarray of int, of shape (num_labels,)
        A row of several classes is an example of each of them, one without any of none.
    weights : ndarray of shape (n,)
        Weight of each row, above 0.
    min_passes : int

    Returns
    -------
    classes, coefficients, intercepts : ndarray of shape (k,), (num_features, k) and (k,)
        Of the classes that have rows, in ascending order.
    """
    classes, index = np.unique(class_ids, return_inverse=True)
    num_rows, num_features = features.shape
    ones = np.ones(len(rows), bool)
    members = csr_matrix((ones, (index, rows)), shape=(len(classes), num_rows))
    if kernels.library() is not None:
        passes = min(max(_MAX_VISITS // (len(classes) * num_rows), min_passes), MAX_PASSES)
        machines = kernels.fit_machines(features, members, weights, passes=passes)
        return classes, machines[:-1], machines[-1]

    # liblinear computes in fp64
    features = features.astype(np.float64)
    coefficients = np.zeros((num_features, len(classes)), np.float32)
    intercepts = np.ones(len(classes))
    # a rough optimum, as a few passes give, unless the caller asks for all of them
    tolerance = 0.1 if min_passes < MAX_PASSES else 1e-4
    for i in range(len(classes)):
        # LinearSVC refuses a class that all rows have: its decision stays 1, the intercept
        is_member = members[i].toarray()[0]
        if not is_member.all():
            machine = LinearSVC(tol=tolerance, random_state=0)
            machine.fit(features, is_member, sample_weight=weights)
            coefficients[:, i] = machine.coef_[0]
            intercepts[i] = machine.intercept_[0]
    return classes, coefficients, intercepts
