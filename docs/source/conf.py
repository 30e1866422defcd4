# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Sphinx configuration: ``python -m sphinx -W docs/source build/docs`` with the fork installed."""

import importlib.metadata

project = 'DeepSpeed with live affine transfer'
author = copyright = 'DeepSpeed Team'
release = importlib.metadata.version('deepspeed')

extensions = ['sphinx.ext.autodoc']
autodoc_member_order = 'bysource'
autodoc_typehints = 'description'
html_theme = 'alabaster'
