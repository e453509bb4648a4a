# The training loop as make sees it; a recipe sets variables and includes this.
#
# The list is the target: every stage's target is its stdout (the paths of what it made), one small file that appears when the
# stage ended with exit code 0, and that the next stage reads. Folders are never targets. So `make -n` shows what is left to do,
# a loop killed at any moment continues when it is run again, and `make -j2` rolls out round k while round k-1 trains, when
# LAG allows that. lego-serve wraps make from outside:
#
#     bin/lego-serve MODEL -- make -j2 -f recipes/grpo.mk RUN=runs/first LAG=1
#
# A run's folder:  RUN/step-0003/{tasks.list, rollout/, rollout.list, graded/, graded.list, checkpoint/, train.list, *.log}
include $(dir $(lastword $(MAKEFILE_LIST)))stages.mk

# What to run. A recipe, the environment or the command line may set any of these.
RUN ?= runs/$(basename $(notdir $(firstword $(MAKEFILE_LIST))))
ROUNDS ?= 8
LAG ?= 0
SEED ?= 0
# The model that round 1 starts from: the folder that lego-serve serves.
MODEL ?= $(or $(LEGORL_MODEL),$(shell $(python) $(here)get_model.py))
# Tasks: a set made by TASK_SET; every round takes the next TASKS of its TRAIN selection, in one shuffled order.
TASK_SET ?= shell --count 96 --seed $(SEED)
TRAIN ?= --split train
TASKS ?= 8
ATTEMPTS ?= 8
HARNESS ?= mini-swe-agent
ROLLOUT ?= -c 8 --max-turns 8 --turn-tokens 256 --time-limit 300
GRADE ?= -c 2
TRAINER ?= --loss grpo

pad = $(shell printf %04d $(1))
at = $(RUN)/step-$(call pad,$(1))
less = $(shell echo $$(( $(1) > $(2) ? $(1) - $(2) : 0 )))
shuffle := $(python) -c 'import random, sys; lines = sys.stdin.readlines(); random.Random(sys.argv[1]).shuffle(lines); print(*lines, sep="", end="")'

.PHONY: all loop
all: loop
loop: $(call at,$(ROUNDS))/train.list

# Step 0 is the model itself: nothing was rolled out for it.
$(call at,0)/train.list:
	@mkdir -p $(@D); echo $(MODEL) $(keep)
$(call at,0)/rollout.list:
	@mkdir -p $(@D); : $(keep)

# The tasks in the order in which rounds take them, repeated when they run out.
$(RUN)/tasks.list:
	$(phase) "tasks" $(@D)/tasks.log $(bin)/lego-tasks $(TASK_SET) --out $(RUN)/tasks > /dev/null
	@$(bin)/lego-tasks list $(RUN)/tasks $(TRAIN) | $(shuffle) $(SEED) $(keep)

# $1 this step, $2 the step before it, $3 the step whose weights it is rolled out with.
define step
$(call at,$1)/tasks.list: $(RUN)/tasks.list
	@mkdir -p $$(@D)
	@for k in $$$$(seq $(TASKS)); do \
	    sed -n "$$$$(( (($1 - 1) * $(TASKS) + k - 1) % $$$$(wc -l < $$<) + 1 ))p" $$<; \
	done $$(keep)
$(call at,$1)/rollout.list: $(call at,$3)/train.list $(call at,$1)/tasks.list | $(call at,$2)/rollout.list
	$$(phase) -w "round $1  rollout" $$(@D)/rollout.log $(bin)/lego-rollout - --out $$(@D)/rollout --harness $(HARNESS) \
	    --run $(notdir $(RUN)) --step $1 -n $(ATTEMPTS) --policy $$(call last,$$<) --seed $(SEED) $(ROLLOUT) < $$(@D)/tasks.list $$(keep)
$(call at,$1)/graded.list: $(call at,$1)/rollout.list
	$$(phase) -w "round $1  grade" $$(@D)/grade.log $(bin)/lego-grade - --out $$(@D)/graded $(GRADE) < $$< $$(keep)
$(call at,$1)/train.list: $(call at,$1)/graded.list $(call at,$2)/train.list
	$$(phase) -w "round $1  train" $$(@D)/train.log $(bin)/lego-train - --model $$(call last,$(call at,$2)/train.list) --out $$(@D)/checkpoint \
	    --seed $(SEED) $(TRAINER) < $$< $$(keep)
endef
$(foreach k,$(shell seq $(ROUNDS)),$(eval $(call step,$k,$(call less,$k,1),$(call less,$k,$(shell expr 1 + $(LAG))))))
