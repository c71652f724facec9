# lib.mk: the library alone: make -f lib.mk [lib] [install-lib] [prefix=/usr] [libdir=...] [DESTDIR=...].
# The Makefile includes it. CFLAGS, CPPFLAGS and LDFLAGS of the environment count.
CC = cc
CFLAGS ?= -O2 -g
prefix = /usr/local
libdir = $(prefix)/lib
DESTDIR =
BUILD ?= build/release
Q := $(if $(V),,@)
# On a terminal, which file is compiled: the next line stands over it.
SHOW = $(if $(V),,[ ! -t 1 ] || printf 'compiling %s\033[K\r' $<;)
.DELETE_ON_ERROR:
.SECONDARY:

WARNINGS := -Wall -Wextra -Werror=incompatible-pointer-types -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes \
            -Wcast-qual -Wvla -Wundef -Wformat=2
ALL_CFLAGS := -std=c17 -D_GNU_SOURCE -pthread -fPIC -fvisibility=hidden $(WARNINGS) -Iinclude $(CPPFLAGS) $(CFLAGS) $(SANITIZE) $(ASSERTS)
LIBCONFIG := $(or $(shell pkg-config --libs libconfig 2>/dev/null),-lconfig)
LIBS := $(LIBCONFIG) -lm -pthread

version_of = $(shell sed -n 's/^\#define REBATCH_VERSION_$(1) //p' include/rebatch/version.h)
MAJOR := $(call version_of,MAJOR)
VERSION := $(MAJOR).$(call version_of,MINOR).$(call version_of,PATCH)

# Stand-ins are for a build without libconfig (python/native.py).
LIB_SRC := $(filter-out %_absent.c, \
    $(wildcard src/base/*.c src/device/*.c src/pool/*.c src/pool/*/*.c src/inspect/*.c src/recover/*.c \
               src/check/*.c src/probe/*.c src/config/*.c src/launch/*.c)) $(LIB_MORE_SRC)
objects = $(patsubst %.c,$(BUILD)/%.o,$(1))
LIB_OBJ := $(call objects,$(LIB_SRC))
STATIC := $(BUILD)/librebatch.a
# Before 1.0 a new minor version may change structs, so it is another library.
SOVERSION := $(if $(filter 0,$(MAJOR)),0.$(call version_of,MINOR),$(MAJOR))
SONAME := librebatch.so.$(SOVERSION)
SHARED := $(BUILD)/librebatch.so.$(VERSION)
PUBLIC_HEADERS := $(wildcard include/rebatch/*.h)

.DEFAULT_GOAL := lib
lib: $(STATIC) $(SHARED)

$(BUILD)/src/%.o: private FOLDER_CFLAGS := -Isrc
# Pairs of stores to a struct are faster one by one.
$(BUILD)/src/pool/%.o: private FOLDER_CFLAGS := -Isrc -fno-tree-slp-vectorize

$(BUILD)/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(SHOW) $(CC) $(ALL_CFLAGS) $(FOLDER_CFLAGS) -MMD -MP -c -o $@ $<

# Changed when the flags are, so that everything is built again.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(ALL_CFLAGS)' | cmp -s - $@ || { scripts/show-found; \
	    echo '$(CC) $(ALL_CFLAGS)' > $@; }

$(STATIC): $(LIB_OBJ)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^

# What the library exports, and under which version. -Wl would cut the path of a sanitizer build at its comma.
EXPORTS := $(BUILD)/librebatch.map
$(EXPORTS): scripts/librebatch.map.in include/rebatch/version.h
	@mkdir -p $(@D)
	@sed -e 's|@soversion@|$(SOVERSION)|' $< > $@

# A sanitizer's runtime is in the program, not in the library.
$(SHARED): $(LIB_OBJ) $(EXPORTS)
	$(Q)$(CC) $(SANITIZE) $(LDFLAGS) -shared -Wl,-soname,$(SONAME) -Xlinker --version-script=$(EXPORTS) \
	    $(if $(SAN),,-Wl,--no-undefined) -o $@ $(LIB_OBJ) $(LIBS)
	@ln -sf $(@F) $(BUILD)/$(SONAME)
	@ln -sf $(SONAME) $(BUILD)/librebatch.so

install-lib: lib
	@install -d $(DESTDIR)$(prefix)/include/rebatch $(DESTDIR)$(libdir)/pkgconfig $(DESTDIR)$(libdir)/cmake/rebatch
	@install -m 644 $(PUBLIC_HEADERS) $(DESTDIR)$(prefix)/include/rebatch
	@install -m 644 $(STATIC) $(DESTDIR)$(libdir)
	@install -m 755 $(SHARED) $(DESTDIR)$(libdir)
	@ln -sf $(notdir $(SHARED)) $(DESTDIR)$(libdir)/$(SONAME)
	@ln -sf $(SONAME) $(DESTDIR)$(libdir)/librebatch.so
	@fill() { sed -e 's|@prefix@|$(prefix)|' -e 's|@libdir@|$(libdir)|' -e 's|@version@|$(VERSION)|' \
	    -e 's|@soname@|$(SONAME)|' -e 's|@soversion@|$(SOVERSION)|' scripts/$$1.in > $(DESTDIR)$(libdir)/$$2/$$1; }; \
	fill rebatch.pc pkgconfig && fill rebatchConfig.cmake cmake/rebatch && fill rebatchConfigVersion.cmake cmake/rebatch

-include $(LIB_OBJ:.o=.d)
FORCE:
.PHONY: lib install-lib FORCE
