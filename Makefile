# rebatch: `make help` says what there is to make.

# ---- what was asked for ------------------------------------------------------------------------
CXX = c++
SAN =
CHECK =

VARIANT := $(subst $() ,-,$(strip $(if $(CHECK),check) $(if $(SAN),debug-$(SAN))))
BUILD := build/$(or $(VARIANT),release)

# gcc's UBSan, where it is shared and beside ASan, does not write where its options say.
SANITIZE := $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer \
              $(if $(findstring clang,$(CC)),,-static-libubsan))
ASSERTS := $(if $(CHECK)$(SAN),-DRBI_ASSERTS) $(if $(CHECK),-DRBI_CHECK)
# What clang's check of a call's type asks for is in C++'s library, which no test links.
SANITIZE_CXX := $(SANITIZE) $(if $(SAN),$(if $(findstring clang,$(CXX)),-fno-sanitize=function))
# The walkers that check the pool's equations.
INVARIANTS_SRC := $(wildcard tests/invariants/*.c)
LIB_MORE_SRC := $(if $(CHECK),$(INVARIANTS_SRC))

# Several jobs at once, as many as processors, without the user having to say so.
PARALLEL = $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc 2>/dev/null || echo 1))
SUBMAKE = +@[ ! -t 1 ] || trap "printf '\\033[K'" EXIT; $(MAKE) -s --no-print-directory $(PARALLEL)

include lib.mk
.DEFAULT_GOAL := build

# ---- the command, and the library that is preloaded into programs -------------------------------
CLI_SRC := $(wildcard src/cli/*.c)
PRELOAD_SRC := $(wildcard preload/*.c)
CLI_OBJ := $(call objects,$(CLI_SRC))
PRELOAD_OBJ := $(call objects,$(PRELOAD_SRC))
# A sanitizer's runtime must be the first library of a program, so there nothing can be preloaded.
PRELOAD := $(if $(SAN),$(PRELOAD_OBJ),$(BUILD)/librebatch_wrap.so)
COMMAND := $(BUILD)/rebatch

$(BUILD)/preload/%.o: private FOLDER_CFLAGS := -Isrc -I.
# What the command prints is looked after as in the examples (output.h).
$(BUILD)/src/cli/%.o: private FOLDER_CFLAGS := -Isrc -Iexamples

# The session is that of the shared library; of the static one come the library's private parts,
# which stay inside. It shows the driver's names and dlsym alone.
$(BUILD)/librebatch_wrap.so: $(PRELOAD_OBJ) $(SHARED) $(STATIC)
	$(Q)$(CC) $(LDFLAGS) -shared -Wl,-soname,$(@F) -Wl,--no-undefined -Wl,--exclude-libs,ALL -Wl,-rpath,'$$ORIGIN' \
	    -o $@ $(PRELOAD_OBJ) -L$(BUILD) -lrebatch $(STATIC) $(LIBS) -ldl

$(COMMAND): $(CLI_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) $(LDFLAGS) -o $@ $^ $(LIBS)

-include $(patsubst %.o,%.d,$(CLI_OBJ) $(PRELOAD_OBJ))

MAN_PAGES := build/man/man1/rebatch.1 build/man/man3/rebatch.3 \
    $(patsubst include/rebatch/%.h,build/man/man3/rebatch_%.3, \
        $(filter-out %/rebatch.h %/libtorch.h,$(PUBLIC_HEADERS)))

# The manual: one page for the command, and one for each public header of C from its comments.
MAN_DATE = $(shell date -u -d @$${SOURCE_DATE_EPOCH:-$$(stat -c %Y $<)} +%F)
build/man/man1/%.1: docs/man/%.1 include/rebatch/version.h
	@mkdir -p $(@D)
	$(Q)sed -e 's/@date@/$(MAN_DATE)/' -e 's/@version@/$(VERSION)/' $< > $@

HEADER_PAGE = @mkdir -p $(@D) && scripts/expand-lists $< | \
    scripts/man-page -v version=$(VERSION) -v date=$(MAN_DATE) > $@
build/man/man3/rebatch.3: include/rebatch/rebatch.h
	$(HEADER_PAGE)
build/man/man3/rebatch_%.3: include/rebatch/%.h
	$(HEADER_PAGE)
$(filter %.3,$(MAN_PAGES)): include/rebatch/version.h scripts/expand-lists scripts/man-page

include examples/examples.mk
include examples/gpt/gpt.mk
include bench/bench.mk
include tests/tests.mk

# ---- what people run ---------------------------------------------------------------------------
all: $(STATIC) $(SHARED) $(PRELOAD) $(COMMAND) $(MINIMAL) $(EXAMPLES) $(MLP_BEFORE) $(GUIDE) $(MAN_PAGES)

build: ## the library, the command and the examples; what make alone does; installs nothing
	@scripts/install-deps --look library
	$(SUBMAKE) all
	@echo "built in $(BUILD): librebatch.so, librebatch.a, librebatch_wrap.so, rebatch, examples/"

FRONTS =
wheel: ## the Python package as one file in build/wheel (a release: FRONTS=all)
	@PYTHON=$(PYTHON) scripts/install-deps python
	@PYTHON=$(PYTHON) scripts/wheel build/wheel $(FRONTS)

test-wheel: ## what FRONTS=all built, beside three versions of PyTorch, which it downloads
	@PYTHON=$(PYTHON) scripts/install-deps python
	@PYTHON=$(PYTHON) scripts/test-wheel "$$(ls build/wheel/*.whl 2>/dev/null)" $(FRONTS)

lint: ## format, banned calls, include order, headers alone, what the contract names
	@PYTHON=$(PYTHON) scripts/install-deps build lint python
	@PYTHON=$(PYTHON) scripts/python-env --tools build/python
	@scripts/lint

docs: ## the site with the APIs in build/docs/html; checks its links and the man pages
	@scripts/install-deps build docs
	$(SUBMAKE) $(MAN_PAGES)
	@PYTHON=$(PYTHON) scripts/venv build/docs/venv sphinx==9.0.4 myst-parser==5.2.0 furo==2025.12.19 sphinx-autoapi==3.9.0
	@rm -rf build/docs/doxygen build/docs/html && mkdir -p build/docs/doxygen
	@VERSION=$(VERSION) doxygen docs/Doxyfile
	@VERSION=$(VERSION) build/docs/venv/bin/sphinx-build -qEW --keep-going -c docs -d build/docs/doctrees . build/docs/html
	@cp build/docs/html/README.html build/docs/html/index.html
	@scripts/check-links build/docs/html
	@scripts/check-man $(MAN_PAGES)

promises: ## which tests hold which promise of the contract: build/promises.md
	@mkdir -p build
	@scripts/promises >build/promises.md
	@echo build/promises.md

check-abi: ## fails, with the names, if programs built with the last release of this soname would not run
	@scripts/install-deps build abi
	$(SUBMAKE) $(SHARED)
	@scripts/check-abi $(SHARED)

new-abi: ## makes this library the release that check-abi compares with, in tests/abi
	@scripts/install-deps build abi
	$(SUBMAKE) $(SHARED)
	@scripts/check-abi --write $(SHARED)

deb: ## Debian's packages of the last commit in build/deb (looks with lintian where that is)
	@scripts/install-deps library deb
	@scripts/deb build/deb

MAN := $(DESTDIR)$(prefix)/share/man
DOC := $(DESTDIR)$(prefix)/share/doc/rebatch
INSTALLED = lib $(PRELOAD) $(COMMAND) $(MAN_PAGES)
installed: $(INSTALLED)
install: ## into DESTDIR/prefix: libraries, headers, command, man pages, documents, examples
	@scripts/install-deps --look library
	$(SUBMAKE) install-lib $(INSTALLED)
	@install -d $(DESTDIR)$(prefix)/bin $(MAN)/man1 $(MAN)/man3 $(DOC)/docs $(DOC)/examples/guide
	@install -m 755 $(filter %.so,$(PRELOAD)) $(DESTDIR)$(libdir)
	@install -m 755 $(COMMAND) $(DESTDIR)$(prefix)/bin
	@install -m 644 $(filter %.1,$(MAN_PAGES)) $(MAN)/man1
	@install -m 644 $(filter %.3,$(MAN_PAGES)) $(MAN)/man3
	@install -m 644 README.md LICENSE CHANGELOG.md $(DOC)
	@install -m 644 $(wildcard docs/*.md docs/*.svg) $(DOC)/docs
	@install -m 644 $(filter-out %.mk,$(wildcard examples/*.*)) examples/Makefile $(DOC)/examples
	@install -m 644 $(wildcard examples/guide/*) $(DOC)/examples/guide
	@# Each function has a page that leads to that of its header.
	@cd $(MAN)/man3 && for page in $(notdir $(filter %.3,$(MAN_PAGES))); do \
	    for name in $$(sed -n 's/^\.SS \(rebatch_[a-z_]*\)()$$/\1/p' $$page); do \
	        [ $$name.3 = $$page ] || { echo ".so man3/$$page" > $$name.3; chmod 644 $$name.3; }; \
	    done; \
	done
	@echo "installed in $(DESTDIR)$(prefix)"
	@$(if $(DESTDIR),:,echo "run 'sudo ldconfig' so that programs find librebatch.so, or set LD_LIBRARY_PATH=$(libdir)")

uninstall: ## removes from DESTDIR/prefix what install put there
	@rm -rf $(DESTDIR)$(prefix)/include/rebatch $(DESTDIR)$(libdir)/cmake/rebatch $(DOC)
	@rm -f $(DESTDIR)$(libdir)/librebatch.* $(DESTDIR)$(libdir)/librebatch_wrap.so $(DESTDIR)$(prefix)/bin/rebatch \
	    $(DESTDIR)$(libdir)/pkgconfig/rebatch.pc $(MAN)/man1/rebatch.1 $(MAN)/man3/rebatch.3 \
	    $(MAN)/man3/rebatch_*.3
	@echo "removed from $(DESTDIR)$(prefix)"

clean: ## remove build/
	rm -rf build

ALL_MAKEFILES := Makefile lib.mk examples/examples.mk examples/gpt/gpt.mk bench/bench.mk tests/tests.mk
help: ## this list
	@echo "make WHAT, where WHAT is"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(ALL_MAKEFILES) | expand -t 22
	@echo "variables: CC CFLAGS CPPFLAGS LDFLAGS SAN prefix libdir DESTDIR; V=1 shows every command"

.PHONY: all installed test-programs test-variables $(shell sed -n 's/^\([a-z-]*\):.*## .*/\1/p' $(ALL_MAKEFILES))
