# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What is installed inside vLLM: a small model with DeepSeek-V4.1's caches, and a recorder of what builders build."""
