# What every recipe begins with: its shell, the commands' places, and what turns a command's stdout into a target.
#
#     include $(dir $(lastword $(MAKEFILE_LIST)))stages.mk
#
# bash, asked to end when make ends, however it ends; recipes/phase does the same for what it runs.
SHELL := /usr/bin/setpriv
.SHELLFLAGS := --pdeathsig TERM /bin/bash -eu -o pipefail -c
.DELETE_ON_ERROR:
.SECONDARY:
.DEFAULT_GOAL := all

here := $(dir $(lastword $(MAKEFILE_LIST)))
bin := $(here)../bin
python := $(here)../.venv/bin/python

# $(phase) [-w] LABEL LOG COMMAND $(keep): run it, its words in LOG and one line on the terminal, its stdout as the target.
phase = @mkdir -p $(@D); setpriv --pdeathsig TERM $(here)phase
keep = > $@.tmp && mv $@.tmp $@
# $(call last,LIST): its last line, for an argument.
last = "$$(tail -n 1 $(1))"
