# Tasks from real libraries with bugs put into them: at least 200, split by library.
#
#     make -f recipes/synth.mk                          # tasks/synth/train.list and heldout.list; a report at the end
#     make -f recipes/synth.mk OUT=tasks/synth COUNT=60 CHECK=10
#
# The list is the target: a library's list appears when all its tasks are there. Killed at any moment, make goes on where it
# was. Other libraries: add lines to a copy of synth.txt, and give PINS.
include $(dir $(lastword $(MAKEFILE_LIST)))stages.mk

OUT ?= tasks/synth
# Most tasks of each library, and how many of them lego-tasks check proves: a number, or all.
COUNT ?= 28
CHECK ?= 3
SEED ?= 0
CORES ?= $(shell nproc)
# Libraries, pinned and hashed as pip wants them; those whose tasks are held out; and where the sdists are or go.
PINS ?= $(here)synth.txt
HELDOUT ?= inflection schema tinydb
SDISTS ?= $(OUT)/sdists
PIP ?= $(python) -m pip

begun := $(shell date +%s)
libraries := $(shell sed -n 's/^\([a-z0-9._-]*\)==\([^ ]*\) .*/\1-\2/p' $(PINS))
held := $(foreach name,$(HELDOUT),$(filter $(name)-%,$(libraries)))
ifeq ($(libraries),)
$(error $(PINS) names no library as NAME==VERSION --hash=sha256:...)
endif
lists = $(foreach library,$(1),$(OUT)/$(library).list)

.PHONY: all
all: $(OUT)/train.list $(OUT)/heldout.list $(OUT)/checked.list
	@$(bin)/lego-tasks synth-report $(OUT)
	@printf '\n%d tasks in $(OUT)/train.list, %d in heldout.list; %d s\n' \
	    $$(wc -l < $(OUT)/train.list) $$(wc -l < $(OUT)/heldout.list) $$(( $$(date +%s) - $(begun) ))

$(SDISTS)/%.tar.gz:
	@mkdir -p $(@D) $(OUT)
	@grep -F "$$(echo '$*' | sed 's/-\([^-]*\)$$/==\1/') " $(PINS) > $(OUT)/$*.pin
	$(phase) "download  $*" $(OUT)/$*.log $(PIP) download -q --no-deps --no-binary :all: --require-hashes \
	    -r $(OUT)/$*.pin -d $(SDISTS)

$(OUT)/%.list: $(SDISTS)/%.tar.gz
	@mkdir -p $(@D)
	@awk -v pin="$$(echo '$*' | sed 's/-\([^-]*\)$$/==\1/')" '$$1 == pin { sub(/.*sha256:/, ""); print $$0 "  $<" }' $(PINS) \
	    | sha256sum --check --quiet
	$(phase) -w "synth  $*" $(OUT)/$*.log $(bin)/lego-tasks synth $< --out $(OUT)/$* --count $(COUNT) --seed $(SEED) \
	    -c $(CORES) $(addprefix --heldout ,$(HELDOUT)) $(keep)

$(OUT)/train.list: $(call lists,$(filter-out $(held),$(libraries)))
	@mkdir -p $(@D); cat $^ /dev/null $(keep)
$(OUT)/heldout.list: $(call lists,$(held))
	@mkdir -p $(@D); cat $^ /dev/null $(keep)

# Of each library every (COUNT / CHECK)th task, so that a sample has all kinds.
$(OUT)/checked.list: $(OUT)/train.list $(OUT)/heldout.list
	@for list in $(call lists,$(libraries)); do \
	    awk -v want='$(CHECK)' -v have="$$(wc -l < $$list)" \
	        'want == "all" || int(NR * want / have) > int((NR - 1) * want / have)' $$list; \
	done > $@.sample
	$(phase) -w "check" $(OUT)/check.log $(bin)/lego-tasks check - -c $(CORES) < $@.sample $(keep)
