"""Linear support vector machines, one for each class."""

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.svm import LinearSVC

from histocoder.ops import kernels

MAX_PASSES, MIN_PASSES = 30, 6  # over the rows: 30 come close to the optimum, 6 close enough
_MAX_VISITS = (
    200_000_000  # rows times classes times passes, beyond which there are fewer: 8 s of two cores
)


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
    members = csr_matrix(
        (np.ones(len(rows), bool), (index, rows)), shape=(len(classes), features.shape[0])
    )
    if kernels.library() is not None:
        passes = min(max(_MAX_VISITS // (len(classes) * features.shape[0]), min_passes), MAX_PASSES)
        found = kernels.fit_machines(features, members, weights, passes=passes)
        return classes, found[:-1], found[-1]
    features = features.astype(np.float64)  # as liblinear computes
    coefficients, intercepts = (
        np.zeros((features.shape[1], len(classes)), np.float32),
        np.ones(len(classes)),
    )
    for i in np.flatnonzero(
        np.diff(members.indptr) < features.shape[0]
    ):  # LinearSVC refuses a single class
        machine = LinearSVC(tol=0.1 if min_passes < MAX_PASSES else 1e-4, random_state=0)
        machine.fit(features, members[i].toarray()[0], sample_weight=weights)
        coefficients[:, i], intercepts[i] = machine.coef_[0], machine.intercept_[0]
    return classes, coefficients, intercepts
