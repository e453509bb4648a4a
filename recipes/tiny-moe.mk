# Routing replay, shown: a small sparse model, trained here from random weights, samples; a trainer in another precision
# then reads the tokens with the experts that were recorded, and with those that it would choose by itself.
#
#     make -f recipes/tiny-moe.mk                  # a table; exit code other than 0 if replay does less than it should
#     make -f recipes/tiny-moe.mk RUN=runs/moe EPOCHS=12 SAMPLERS=float32
#
# An expert (a script with the known solutions) plays every task and is graded; EPOCHS steps of sft on that; then every
# SAMPLER plays the same tasks. RUN holds a list a stage, as with every recipe: killed at any moment, make goes on where it
# was. The servers are inside: each lives for one stage.
include $(dir $(lastword $(MAKEFILE_LIST)))stages.mk

RUN ?= runs/tiny-moe
TASKS ?= shell --count 70 --level 0 --level 1 --split train --seed 0
EPOCHS ?= 8
SFT ?= --loss sft --lr 2e-3 --minibatches 23
# Precisions of the sampler, and of the trainer.
SAMPLERS ?= float32 bfloat16
TRAINER ?= --dtype bf16
ROLLOUT ?= -n 1 -c 4 --temperature 1 --max-turns 3 --turn-tokens 64 --time-limit 120
GRADE ?= -c 2

# $(call play,NAME,MODEL LIST,ENGINE): every task once with that engine, for step NAME.
play = $(bin)/lego-serve $(call last,$(2)) $(3) -- $(bin)/lego-rollout - --out $(RUN)/$(1)/rollout --run $(1) \
    --harness $(here)tiny-moe.toml $(ROLLOUT) < $(RUN)/tasks.list $(keep)

.PHONY: all
all: $(foreach one,$(SAMPLERS),$(RUN)/$(one)/replay.list $(RUN)/$(one)/no-replay.list)
	@$(python) $(here)tiny_moe.py report $(foreach one,$(SAMPLERS),$(RUN)/$(one))

$(RUN)/tasks.list:
	$(phase) "tasks" $(RUN)/tasks.log $(bin)/lego-tasks $(TASKS) --out $(RUN)/tasks $(keep)
$(RUN)/model.list: $(RUN)/tasks.list
	$(phase) "model" $(RUN)/model.log $(python) $(here)tiny_moe.py model $(RUN)/model < $< $(keep)
$(RUN)/script.jsonl: $(RUN)/tasks.list
	@$(python) $(here)tiny_moe.py script < $< $(keep)

$(RUN)/expert/rollout.list: $(RUN)/model.list $(RUN)/script.jsonl
	$(phase) -w "expert  rollout" $(@D)/rollout.log $(call play,expert,$<,--engine script --script $(RUN)/script.jsonl)
%/graded.list: %/rollout.list
	$(phase) -w "$(notdir $*)  grade" $(@D)/grade.log $(bin)/lego-grade - --out $*/graded $(GRADE) < $< $(keep)

$(RUN)/sft-0/train.list: $(RUN)/model.list
	@mkdir -p $(@D); cp $< $@
# $1 this epoch, $2 the one before it.
define epoch
$(RUN)/sft-$1/train.list: $(RUN)/sft-$2/train.list $(RUN)/expert/graded.list
	$$(phase) -w "sft  epoch $1" $$(@D)/train.log $(bin)/lego-train - --model $$(call last,$$<) --out $$(@D)/checkpoint \
	    --keep 1 --seed $1 $(SFT) < $(RUN)/expert/graded.list $$(keep)
endef
$(foreach k,$(shell seq $(EPOCHS)),$(eval $(call epoch,$k,$(shell expr $k - 1))))

define sampler
$(RUN)/$1/rollout.list: $(RUN)/sft-$(EPOCHS)/train.list
	$$(phase) -w "$1  rollout" $$(@D)/rollout.log $$(call play,$1,$$<,--engine torch --dtype $1 --routing require)
$(RUN)/$1/replay.list $(RUN)/$1/no-replay.list: $(RUN)/$1/%.list: $(RUN)/sft-$(EPOCHS)/train.list $(RUN)/$1/graded.list
	$$(phase) -w "$1  $$*" $$(@D)/$$*.log $(bin)/lego-train - --model $$(call last,$$<) --out $$(@D)/$$* --loss grpo \
	    --gate none --gate-tokens 1000000 --$$* $(TRAINER) < $(RUN)/$1/graded.list $$(keep)
endef
$(foreach one,$(SAMPLERS),$(eval $(call sampler,$(one))))
