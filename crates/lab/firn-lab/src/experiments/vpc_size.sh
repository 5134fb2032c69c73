# The work of vpc-size, in the guest: `make` writes what the programs read, the name of one runs it for ever, or until it fails. All is in
# memory.
set -e
cd /tmp
words='srand 1;
    my @words = map { my $word = ""; $word .= chr(97 + rand 26) for 0 .. 2 + rand 9; $word } 1 .. 4000;'
case $1 in
make)
    perl -e "$words"' for (1 .. 700000) { print $words[rand(63) * rand 63], rand 9 < 8 ? " " : "\n" }' > text
    perl -e "$words"'
        print "#include <string.h>\nstruct item { int key; struct item *next; char name[24]; };\n";
        for my $n (0 .. 399) {
            print "static int f$n(struct item *i, int a, int b) {\n  int s = a * @{[int rand 99]};\n";
            print "  for (int k = 0; k < b; k++) {\n";
            for (0 .. 3 + rand 9) {
                my ($x, $y) = (int rand 1000, int rand 31);
                print "    switch ((s >> $y) & 3) { case 0: s += k ^ $x; break; case 1: s = s * $x + b; break;";
                print " case 2: if (i && strcmp(i->name, \"$words[$x]\") > 0) i = i->next; break; default: s ^= a << $y; }\n";
            }
            print "  }\n  return s + (i ? i->key : ", $n ? "f@{[$n - 1]}(i, b, a & 7)" : "0", ");\n}\n";
        }
        print "int main(int argc, char **argv) { struct item i = {argc, 0, \"x\"}; return f399(&i, argc, argc); }\n"' > source.c
    perl -e "$words"'
        print "<shop>\n";
        for my $n (1 .. 6000) {
            print " <item id=\"$n\" kind=\"$words[rand 40]\"><name>$words[rand 4000] $words[rand 4000]</name>";
            print "<price>@{[int rand 5000]}</price><about>", join(" ", map { $words[rand 4000] } 0 .. 12), "</about></item>\n";
        }
        print "</shop>\n"' > shop.xml
    cat > shop.xsl <<'END'
<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform">
  <xsl:output method="html"/>
  <xsl:key name="kind" match="item" use="@kind"/>
  <xsl:template match="/shop">
    <html><body>
      <xsl:for-each select="item[generate-id() = generate-id(key('kind', @kind)[1])]">
        <xsl:sort select="@kind"/>
        <h1><xsl:value-of select="@kind"/> <xsl:value-of select="sum(key('kind', @kind)/price)"/></h1>
        <table><xsl:apply-templates select="key('kind', @kind)"><xsl:sort select="price" data-type="number"/></xsl:apply-templates></table>
      </xsl:for-each>
    </body></html>
  </xsl:template>
  <xsl:template match="item">
    <tr><td><xsl:value-of select="name"/></td><td><xsl:value-of select="price"/></td>
      <td><xsl:value-of select="substring-before(concat(about, ' '), ' ')"/></td></tr>
  </xsl:template>
</xsl:stylesheet>
END
    ;;
perl)
    # Counts, sorts, and joins words, as programs that read mail or logs do.
    exec perl -e 'while (1) {
        open my $in, "<", "text" or die; my (%count, %after, @lines); my $last = "";
        while (<$in>) { chomp; s/(\w+) (\w+)/$2 $1/g; push @lines, $_;
            for (split) { $count{$_}++; $after{$last}{$_}++; $last = $_ } }
        my @most = sort { $count{$b} <=> $count{$a} || $a cmp $b } keys %count;
        my $text = join "\n", grep { /^[a-m].*\b\Q$most[0]\E\b/ } sort @lines;
    }' ;;
bzip2) while bzip2 -9 -c text > text.bz2 && bzip2 -dc text.bz2 > /dev/null; do :; done ;;
gcc) while gcc -O2 -S -o /dev/null source.c; do :; done ;;
xalan) while Xalan -o /dev/null shop.xml shop.xsl; do :; done ;;
esac
