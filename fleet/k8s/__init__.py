"""PaddleJob on Kubernetes: translation to JobSet, TrainJob or plain pods, and an operator.

``python -m fleet.k8s --help`` lists the commands. Needs PyYAML; the operator needs the extra ``k8s``. Nothing here
imports torch, so the operator's image does not need it.
"""
