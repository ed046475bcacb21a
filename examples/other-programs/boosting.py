"""scikit-learn on all cores, and LightGBM. Nothing is seeded, and joblib stores the models."""

import joblib
import lightgbm
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import cross_val_score, train_test_split

features, labels = make_classification(n_samples=600, n_features=12)
train, test, train_labels, test_labels = train_test_split(features, labels)

forest = RandomForestClassifier(n_estimators=20, n_jobs=-1).fit(train, train_labels)
print("forest", forest.score(test, test_labels))
# Two processes compete for the folds. A forest without a seed would draw one in the process that
# gets its fold, so its trees would depend on a race. Therefore the estimator needs a random_state.
folds = RandomForestClassifier(n_estimators=20, random_state=0)
print("folds", cross_val_score(folds, features, labels, cv=4, n_jobs=2))
joblib.dump(forest, "forest.joblib")

booster = lightgbm.LGBMClassifier(n_estimators=20, subsample=0.8, subsample_freq=1, verbosity=-1)
booster.fit(train, train_labels)
print("booster", booster.score(test, test_labels))
booster.booster_.save_model("booster.txt")
joblib.dump(booster, "booster.joblib", compress=3)
